"""What has been found out about models of devices, kept on disk from one process to the next.

Every fact is a small file of its own that is put in place in one step, so that processes side by
side lose nothing. A file that cannot be written or read is no error: it is found out again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arraylogchain import __version__
from arraylogchain._cuda.modules import source_text

Fact = dict[str, Any]


def read(device: str, subject: str, source: str) -> Fact | None:
    """Return what is known of a subject on a model of device, by the kernels' source of now."""
    return _read(_path(device, subject, source))


def write(device: str, subject: str, source: str, **fact: Any) -> None:
    """Keep what has been found out of a subject, if that can be done."""
    path = _path(device, subject, source)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"device": device, "subject": subject, **fact}, file)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)  # a full disk leaves nothing behind


def of_device(device: str) -> Iterator[Fact]:
    """Yield all that is known of a model of device."""
    for path in sorted(_folder().glob("*.json")):
        fact = _read(path)
        if fact is not None and fact.get("device") == device:
            yield fact


def _read(path: Path) -> Fact | None:
    try:
        fact = json.loads(path.read_bytes())
    except (OSError, ValueError):  # not there, not text, not JSON
        return None
    return fact if isinstance(fact, dict) else None


def _path(device: str, subject: str, source: str) -> Path:
    key = repr((__version__, device, subject, source_text(source)))
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "arraylogchain" / "devices"
