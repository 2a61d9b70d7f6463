"""An installed SGLang: patched, and put back to the byte.

A backup lies in the installation's ``.dist-info`` and, with what is added, in its ``RECORD``: so pip removes it with
SGLang. Files are replaced, never written to: an installation may share them with others by hard links.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.patching.series import Series

BACKUP = "feather_patch"
MANIFEST = "manifest.json"
REGISTRY = "sglang/srt/managers/schedule_policy_registry.py"


def digest(content: bytes) -> str:
    """SHA-256, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


class Site:
    """One installation; ``root`` holds the package ``sglang``."""

    def __init__(self, root: Path, release: str, info: Path) -> None:
        self.root = root
        self.release = release
        self._info = info
        self._backup = info / BACKUP

    @classmethod
    def find(cls, folder: Path | None = None) -> Site:
        """The SGLang of this Python, or the one installed in ``folder``."""
        path = sys.path if folder is None else [str(folder)]
        found = next(iter(metadata.distributions(name="sglang", path=path)), None)
        if found is None:
            place = "this Python" if folder is None else folder
            raise FeatherError(f"no sglang is installed in {place}: name the folder that holds it with --site")
        root = Path(str(found.locate_file("")))
        # A checkout is elsewhere, or has an .egg-info beside the package.
        if not (root / "sglang" / "srt").is_dir() or found.read_text("METADATA") is None:
            raise FeatherError(
                f"sglang {found.version} is installed from a checkout: apply the series there, git am patches/RELEASE/*"
            )
        info = Path(str(found.locate_file(f"sglang-{found.version}.dist-info")))
        return cls(root, found.version, info)

    # State ------------------------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        """Content of a file, by its path below ``root``."""
        return (self.root / name).read_bytes()

    @property
    def is_patched(self) -> bool:
        """Whether there is a backup to revert to."""
        return (self._backup / MANIFEST).is_file()

    def state(self) -> str:
        """In words."""
        if self.is_patched:
            try:
                changed = self._changed()
                whole = all(self._now(name) == was["after"] for name, was in self._manifest().items())
            except FeatherError as error:
                return f"patched, and cannot be reverted: {error}"
            if changed:
                return f"patched, and changed since: {', '.join(changed)}"
            return "patched" if whole else "patched in part"
        return "has extension points of its own" if (self.root / REGISTRY).is_file() else "not patched"

    def _manifest(self) -> dict[str, dict[str, str | None]]:
        """Digests of each file before and after; raises ``FeatherError`` where that cannot be trusted."""
        path = self._backup / MANIFEST
        try:
            files = json.loads(path.read_bytes())["files"]
            whole = bool(files) and all(_is_path(name) and _has_digests(was) for name, was in files.items())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise FeatherError(f"{path} is damaged: reinstall sglang {self.release}")
        return dict(files)

    def _now(self, name: str) -> str | None:
        path = self.root / name
        return digest(path.read_bytes()) if path.is_file() else None

    def _kept(self, name: str) -> str | None:
        """Digest of what the backup would put back."""
        path = self._backup / name
        if path.is_symlink():  # a relative one means what it meant in its place
            path = (self.root / name).parent / path.readlink()
        return digest(path.read_bytes()) if path.is_file() else None

    def _changed(self) -> list[str]:
        """Files that are neither as the patch left them nor as they were before it."""
        return [name for name, was in self._manifest().items() if self._now(name) not in was.values()]

    # Change -----------------------------------------------------------------------------------------------------

    def plan(self) -> dict[str, bytes]:
        """What ``apply`` would write; raises ``FeatherError`` where the series does not fit."""
        if self.is_patched:
            raise FeatherError(f"sglang {self.release} in {self.root} is {self.state()}: revert first")
        return Series(self.release).apply(self.read)

    def apply(self) -> list[str]:
        """Patch, all or nothing; returns the files that differ now.

        Raises ``FeatherError``, and writes nothing, where the series does not fit or somebody else patches.
        """
        with self._alone():
            made = self.plan()
            record = self._info / "RECORD"
            changed = sorted(made)
            if record.is_file():
                made[self._name(record)] = self._extended(record, made)
            self._back_up(made)
            # What others import comes last: an SGLang patched in part does not start, rather than run without it.
            try:
                for name in sorted(made, key=lambda name: not (self.root / name).exists()):
                    self._write(name, made[name])
            except BaseException:
                self._revert()
                raise
            return changed

    def revert(self) -> list[str]:
        """Put every file back; returns those that the patch had changed.

        Raises ``FeatherError``, and writes nothing, where there is no backup or a damaged one, a file was changed
        since, or somebody else patches.
        """
        with self._alone():
            return self._revert()

    def _revert(self) -> list[str]:
        if not self.is_patched:
            raise FeatherError(f"sglang {self.release} in {self.root} is {self.state()}: there is nothing to revert")
        if changed := self._changed():
            raise FeatherError(
                f"{', '.join(changed)}: changed since it was patched; undo that, or reinstall sglang {self.release}"
            )
        files = self._manifest()
        differ = {name: was["before"] for name, was in files.items() if was["before"] != self._now(name)}
        if damaged := [name for name, before in differ.items() if self._kept(name) != before]:
            raise FeatherError(
                f"{', '.join(damaged)}: the backup in {self._backup} is damaged; reinstall sglang {self.release}"
            )
        for name, was in sorted(files.items(), key=lambda item: item[1]["before"] is not None):
            path = self.root / name
            _scratch(path).unlink(missing_ok=True)  # of one that was killed
            if was["before"] is None:
                path.unlink(missing_ok=True)
                for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    stale.unlink()
            elif name in differ:
                self._put_back(name)
        # The backup is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=self._info, prefix=f".{BACKUP}-") as scratch:
            os.replace(self._backup, Path(scratch, BACKUP))
        return sorted(name for name in files if not name.endswith("/RECORD"))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep others out, and clear away what one that was killed has left."""
        handle = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FeatherError(f"{self.root} is being patched by another process: wait for it") from None
            for left in self._info.glob(f".{BACKUP}-*"):
                shutil.rmtree(left)
            yield
        finally:
            os.close(handle)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _extended(self, record: Path, made: dict[str, bytes]) -> bytes:
        """The list of installed files with what the patch and its backup add."""
        added = [name for name in made if not (self.root / name).exists()]
        lines = [
            f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(made[name]).digest()).rstrip(b'=').decode()},"
            f"{len(made[name])}"
            for name in added
        ]
        kept = [name for name in [*made, self._name(record)] if name not in added]
        lines += [f"{self._name(self._backup / name)},," for name in [MANIFEST, *kept]]
        text = record.read_bytes()
        return text + (b"" if text.endswith(b"\n") else b"\n") + "".join(f"{line}\n" for line in lines).encode()

    def _back_up(self, made: dict[str, bytes]) -> None:
        """Write the backup beside its place and move it there, so that it is there whole or not at all."""
        with tempfile.TemporaryDirectory(dir=self._info, prefix=f".{BACKUP}-") as scratch:
            backup = Path(scratch, BACKUP)
            backup.mkdir()
            files = {}
            for name, content in made.items():
                files[name] = {"before": self._now(name), "after": digest(content)}
                if files[name]["before"] is not None:
                    kept = backup / name
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(self.root / name, kept, follow_symlinks=False)
            (backup / MANIFEST).write_text(json.dumps({"release": self.release, "files": files}, indent=1) + "\n")
            os.replace(backup, self._backup)

    def _write(self, name: str, content: bytes) -> None:
        path = self.root / name
        mode = path.stat().st_mode if path.exists() else 0o644
        with self._replacing(path) as scratch:
            scratch.write_bytes(content)
            scratch.chmod(mode)

    def _put_back(self, name: str) -> None:
        with self._replacing(self.root / name) as scratch:
            # With its time: Python's compiled files are kept by it.
            shutil.copy2(self._backup / name, scratch, follow_symlinks=False)

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """A file to write that then takes the place of ``path``, or is gone."""
        scratch = _scratch(path)
        scratch.unlink(missing_ok=True)
        try:
            yield scratch
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".feather-{path.name}")


def _is_path(name: str) -> bool:
    """Whether it names a file below a root."""
    path = PurePosixPath(name)
    return name.isprintable() and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _has_digests(was: Any) -> bool:
    """Whether a file's entry says what it was, perhaps nothing, and what it became."""
    texts = [was["after"], *([] if was["before"] is None else [was["before"]])]
    return all(isinstance(text, str) for text in texts)
