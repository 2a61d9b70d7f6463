"""The series of patches for one SGLang release, applied strictly: every line of context where it was, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from unidiff import PatchedFile, PatchSet

from feather_sglang.errors import FeatherError

PREFIX = "python/"  # where SGLang's repository keeps what is installed; all else of it is its tests


def folder() -> Path:
    """Where the series lie: in the package, or in the checkout beside it."""
    here = Path(__file__).resolve().parent.parent
    for candidate in (here / "patches", here.parent / "patches"):
        if candidate.is_dir():
            return candidate
    raise FeatherError("the patches are missing: reinstall feather-sglang")


def releases() -> list[str]:
    """The SGLang releases that have a series, oldest first."""
    found = [path.name for path in folder().iterdir() if re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", path.name)]
    return sorted(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


class Series:
    """The patches of one release; raises ``FeatherError`` for a release that has none."""

    def __init__(self, release: str) -> None:
        if release not in releases():
            raise FeatherError(f"no patches for sglang {release}: there are some for {', '.join(releases())}")
        self.release = release
        self.files = sorted((folder() / release).glob("*.patch"))

    def subjects(self) -> list[str]:
        """What each patch does, in the order in which they apply."""
        texts = [path.read_text("utf-8") for path in self.files]
        return [
            re.sub(r"^Subject: (\[PATCH[^]]*\] )?", "", re.findall(r"^Subject: .*", text, re.M)[0]) for text in texts
        ]

    def apply(self, read: Callable[[str], bytes]) -> dict[str, bytes]:
        """What each file of the site becomes; ``read`` gives a file of it, or raises ``FileNotFoundError``.

        Raises ``FeatherError`` with the first line that is not what the series was made for.
        """
        made: dict[str, bytes] = {}
        for path in self.files:
            for change in PatchSet(path.read_text("utf-8")):
                if not change.path.startswith(PREFIX):
                    continue
                name = change.path.removeprefix(PREFIX)
                try:
                    before = (made[name] if name in made else read(name)).decode(errors="surrogateescape")
                    if change.is_added_file:
                        raise FeatherError(f"{name}: exists already, so this SGLang has extension points of its own")
                except FileNotFoundError:
                    before = ""
                    if not change.is_added_file:
                        raise FeatherError(f"{name}: not there, {self._advice()}") from None
                made[name] = self._change(name, before, change).encode(errors="surrogateescape")
        return made

    def _change(self, name: str, text: str, change: PatchedFile) -> str:
        lines = text.split("\n") if text else [""]
        done: list[str] = []
        taken = 0
        for hunk in change:
            start = max(hunk.source_start - 1, 0)
            done += lines[taken:start]
            taken = start
            for line in hunk:
                value = line.value.rstrip("\n")
                if line.is_added:
                    done.append(value)
                    continue
                found = lines[taken] if taken < len(lines) else "the end of the file"
                if found != value:
                    raise FeatherError(f"{name}:{taken + 1}: has {found!a} for {value!a}, {self._advice()}")
                if line.is_context:
                    done.append(value)
                taken += 1
        return "\n".join(done + lines[taken:])

    def _advice(self) -> str:
        return f"so it is not sglang {self.release} as released: reinstall that, or patch your source by git am"
