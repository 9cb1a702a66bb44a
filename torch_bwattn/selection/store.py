"""A JSON file in the user's cache that several threads and processes add to.

A file that is damaged, of another form or of an older version is set aside under another name and told of once: what is
in it is neither used nor lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import storage

log = logging.getLogger("torch_bwattn")

FORMAT = 1
_told: set[str] = set()


def tell_once(text: str) -> None:
    """A warning that a process gives only once."""
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)


class Store:
    """One file: a JSON object whose ``format`` is :data:`FORMAT`."""

    def __init__(self, folder: str, name: str, valid: Callable[[Any], bool]) -> None:
        self.folder, self.name, self._valid = folder, name, valid
        self._read: tuple[tuple[int, int, int], dict[str, Any]] | None = None

    def path(self, make: bool = False) -> Path | None:
        """Where the file is, or with ``make`` is to be; None where there is none, or none that can be trusted.

        The latter is told once.
        """
        try:
            if not make and not (storage.root() / self.folder / self.name).exists():
                return None
            return storage.private_folder(self.folder) / self.name
        except (OSError, RuntimeError, storage.Distrusted) as error:
            if make or isinstance(error, storage.Distrusted):
                tell_once(f"nothing is kept in {self.folder}: {error}")
            return None

    def load(self) -> dict[str, Any]:
        """The contents; empty where there is no file that can be used."""
        path = self.path()
        if path is None:
            return {}
        try:
            status = path.stat()
        except OSError:
            return {}
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if self._read is None or self._read[0] != stamp:
            self._read = stamp, self._contents(path)
        return self._read[1]

    def update(self, change: Callable[[dict[str, Any]], None]) -> bool:
        """Has ``change`` alter the contents in place, alone among threads and processes; False if they are not kept."""
        path = self.path(make=True)
        if path is None:
            return False
        with storage.exclusive(path.with_suffix(".lock")):
            contents = json.loads(json.dumps(self._contents(path))) if path.exists() else {}
            change(contents)
            contents["format"] = FORMAT
            try:
                storage.write(path, (json.dumps(contents, indent=1, allow_nan=False) + "\n").encode())
            except OSError as error:
                tell_once(f"{path} cannot be written: {error}")
                return False
        return True

    def _contents(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(storage.read(path))
        except storage.Distrusted as error:
            tell_once(f"{path} is ignored: {error}")
            return {}
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            return self._set_aside(path, f"it is damaged ({error})")
        if not isinstance(found, dict) or found.get("format") != FORMAT or not self._valid(found):
            return self._set_aside(path, "it has another form than this version's")
        return found

    def _set_aside(self, path: Path, reason: str) -> dict[str, Any]:
        aside = path.with_suffix(".old")
        with contextlib.suppress(OSError):
            path.replace(aside)
        tell_once(f"{path} is ignored and kept as {aside.name}: {reason}")
        return {}
