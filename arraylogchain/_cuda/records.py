"""What has been found out about models of devices, kept on disk from one process to the next.

Every fact is a line that is appended to one file in one step, so that processes side by side lose
nothing; the latest of a subject holds. A file that cannot be written or read, or a line that is
damaged, is no error: it is found out again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from arraylogchain import __version__
from arraylogchain._cuda.modules import source_text

Fact = dict[str, Any]


def read(device: str, subject: str, source: str) -> Fact | None:
    """Return what is known of a subject on a model of device, by the kernels' source of now."""
    return _facts().get((device, subject, _digest(source)))


def write(device: str, subject: str, source: str, **fact: Any) -> None:
    """Keep what has been found out of a subject, if that can be done."""
    known = {"device": device, "subject": subject, "source": _digest(source), **fact}
    # A line that a full disk has cut off ends where the next one begins.
    line = f"\n{json.dumps(known)}\n".encode()
    with contextlib.suppress(OSError):
        _path().parent.mkdir(parents=True, exist_ok=True)
        with _path().open("ab", buffering=0) as file:
            file.write(line)


def of_device(device: str) -> Iterator[Fact]:
    """Yield all that is known of a model of device."""
    return (fact for (of, *_), fact in _facts().items() if of == device)


def _facts() -> dict[tuple[str, ...], Fact]:
    """Return what is known, by device, subject and source."""
    try:
        return _parsed(_path().read_bytes())
    except OSError:
        return {}


@lru_cache(maxsize=1)
def _parsed(text: bytes) -> dict[tuple[str, ...], Fact]:
    facts: dict[tuple[str, ...], Fact] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no text, no JSON, no fact
            fact = json.loads(line)
            facts[fact["device"], fact["subject"], fact["source"]] = fact
    return facts


def _digest(source: str) -> str:
    return hashlib.sha256(f"{__version__} {source_text(source)}".encode()).hexdigest()[:32]


def _path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "arraylogchain" / "devices.jsonl"
