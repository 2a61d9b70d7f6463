"""What a scheduler measures of its steps: the reward, and the price of prefill; on a server and in simulation."""

from __future__ import annotations

from collections.abc import Sequence

from feather_sglang.scheduling.meters.decode import DecodeMeter
from feather_sglang.scheduling.meters.prefill import Gap, PrefillMeter
from feather_sglang.scheduling.meters.readings import Readings


class StepMeters:
    """The meters of one scheduler, read by the time between results.

    Parameters
    ----------
    chunk_tokens : the most that a step may compute of prompts (``PrefillMeter``).
    """

    def __init__(self, chunk_tokens: int | None) -> None:
        self.decode = DecodeMeter()
        self.prefill = PrefillMeter(chunk_tokens)

    def launched(self, now: float, in_flight: int) -> None:
        """A prefill step is launched; results of `in_flight` decode steps belong to the batch before it."""
        self.decode.restart(in_flight)
        self.prefill.begin(now)

    def ended(
        self, now: float, tokens: int, is_decode: bool, new: Sequence[int] = (), cached: Sequence[int] = ()
    ) -> Gap | None:
        """Take a step's result; return what lay between two decode steps, if the step is the later of them.

        Parameters
        ----------
        tokens : that a decode step generated.
        new, cached : of each prompt, what a prefill step computed and what came before that.
        """
        self.decode.step(now, tokens, is_decode)
        if not is_decode and not new:  # an empty step: others of its data-parallel group work
            self.prefill.idle()
            return None
        pairs = sum([count * (before + count / 2) for count, before in zip(new, cached, strict=False)])
        return self.prefill.step(now, sum(new), pairs, self.decode.step_seconds)

    def reward_paid(self) -> None:
        """The reward was credited: the next one begins."""
        self.decode.take()

    def measured(self, now: float, own_seconds: float | None = None) -> Readings:
        """What an admission round is told that opens at `now`."""
        prefill, bare, step = self.prefill, self.prefill.bare_seconds, self.decode.step_seconds
        return Readings(
            now=now,
            reward=self.decode.rate,
            prefill_seconds=prefill.seconds_per_token,
            fixed_seconds=prefill.fixed_seconds,
            bare_seconds=bare,
            pair_tokens=prefill.pair_seconds / bare if bare else None,
            step_tokens=step / bare if bare and step is not None else None,
            own_seconds=own_seconds,
            least_decode_seconds=self.decode.least_seconds,
        )
