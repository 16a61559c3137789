"""What resolving finds: notes for the plan, and problems that raise or are warned about, by how the user asked."""

from __future__ import annotations

import warnings

from diffusers_omni_offload.messages import logger

_warned: set[tuple[str, str]] = set()


class Findings:
    """Collects notes. With an explicit selection a problem raises ValueError; without one it is warned about and
    noted."""

    def __init__(self, explicit: bool) -> None:
        self.explicit = explicit
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Something that the reader of the plan should know."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def warn(self, sentence: str) -> None:
        """A note that is also a warning."""
        self.note(sentence)
        warnings.warn(sentence, stacklevel=2)

    def problem(self, sentence: str) -> None:
        """Something that was asked for and can't be done. Returns only without an explicit selection."""
        if self.explicit:
            raise ValueError(sentence)
        self.warn(sentence)

    def warn_once(self, topic: str, owner: type, sentence: str) -> None:
        """A warning once per class and topic in this process."""
        if _is_first(topic, owner):
            warnings.warn(sentence, stacklevel=2)

    def say_once(self, topic: str, owner: type, sentence: str) -> None:
        """A note that is also one line of information, once per class and topic in this process."""
        self.note(sentence)
        if _is_first(topic, owner):
            logger.info(sentence)


def _is_first(topic: str, owner: type) -> bool:
    key = (topic, f"{owner.__module__}.{owner.__qualname__}")
    is_first = key not in _warned
    _warned.add(key)
    return is_first
