"""Progress bars of what takes a while; diffusers' `disable_progress_bar()` turns them off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.utils import logging as diffusers_logging
from diffusers.utils.distributed_utils import is_torch_dist_rank_zero

#: Seconds before a bar is shown: what is over sooner needs none.
DELAY = 0.5


class Bar:
    """How much is done.

    Args:
        bar: diffusers' tqdm, which may be one that shows nothing.
        description: what is going on.
        total: how much there is to do.
    """

    def __init__(self, bar: Any, description: str, total: int) -> None:
        self._bar, self._description, self._total = bar, description, total
        self._done, self._began = 0, time.monotonic()

    def advance(self, count: int) -> None:
        """`count` more is done."""
        self.reach(self._done + count)

    def reach(self, count: int) -> None:
        """`count` is done in all, or more, if that was said before."""
        count = min(max(count, self._done), self._total)
        self._bar.update(count - self._done)
        self._done = count

    def note(self, text: str) -> None:
        """Show a few words after the figures, from the next update on."""
        self._bar.set_postfix_str(text, refresh=False)

    @contextmanager
    def meanwhile(self, description: str) -> Iterator[None]:
        """In the body something else is going on."""
        self._bar.set_description_str(description, refresh=False)
        self._bar.update(0)
        if time.monotonic() - self._began > DELAY:
            self._bar.refresh()
        try:
            yield
        finally:
            self._bar.set_description_str(self._description, refresh=False)


#: For work that nobody waits for.
SILENT = Bar(diffusers_logging.EmptyTqdm(), "", 0)


@contextmanager
def progress(description: str, total: int, unit: str = "B") -> Iterator[Bar]:
    """A bar that is gone at the end, and isn't shown at all if that is soon. Of several ranks the first one shows it.

    Args:
        description: what is going on.
        total: how much there is to do.
        unit: what is counted; bytes are written in KiB, MiB and so on.
    """
    with diffusers_logging.tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1024,
        leave=False,
        delay=DELAY,
        miniters=0,
        disable=not is_torch_dist_rank_zero(),
    ) as bar:
        found = Bar(bar, description, total)
        yield found
        found.reach(total)
