"""A JSON file in the user's cache that several threads and processes add to.

A file that is damaged, of another form or of an older version is set aside under another name and told of once: what is
in it is neither used nor lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import storage

log = logging.getLogger("torch_bwattn")

FORMAT = 1


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


class Store:
    """One file: a JSON object whose ``format`` is :data:`FORMAT`. Other formats have files of their own."""

    def __init__(self, folder: str, name: str, valid: Callable[[Any], bool]) -> None:
        self.folder, self.name, self._valid = folder, f"{name}.v{FORMAT}.json", valid
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
                storage.tell_once(log, f"nothing is kept in {self.folder}: {error}")
            return None

    def load(self) -> dict[str, Any]:
        """The contents, the same object while they stay the same; empty where there is no file that can be used."""
        path = self.path()
        if path is None:
            return {}
        try:
            status = path.stat()
        except OSError:
            return {}
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if self._read is None or self._read[0] != stamp:
            self._read = stamp, self._contents(path) or {}
        return self._read[1]

    def update(self, change: Callable[[dict[str, Any]], None]) -> bool:
        """Has ``change`` alter the contents in place, alone among threads and processes; False if they are not kept."""
        path = self.path(make=True)
        if path is None:
            return False
        with storage.exclusive(path.with_suffix(".lock")):
            contents = self._contents(path)
            if contents is None:
                return False
            try:
                change(contents)
                contents["format"] = FORMAT
                storage.write(path, (json.dumps(contents, indent=1, allow_nan=False) + "\n").encode())
            except (OSError, ValueError) as error:
                storage.tell_once(log, f"{path} cannot be written: {error}")
                return False
        return True

    def _contents(self, path: Path) -> dict[str, Any] | None:
        """What a file holds, anew; empty where there is none or a damaged one, None where it must stay as it is."""
        try:
            found = json.loads(storage.read(path), parse_constant=_refuse)
        except FileNotFoundError:
            return {}
        except (storage.Distrusted, OSError) as error:
            storage.tell_once(log, f"{path} is ignored: {error}")
            return None
        except (ValueError, RecursionError) as error:
            return self._set_aside(path, f"it is damaged ({error})")
        if not isinstance(found, dict) or found.get("format") != FORMAT or not self._valid(found):
            return self._set_aside(path, "it has another form than this version's")
        return found

    def _set_aside(self, path: Path, reason: str) -> dict[str, Any]:
        """Keeps a damaged file under a name of its own: the file that stands there now, damaged or not by then."""
        aside = path.with_name(f"{path.stem}.{time.time_ns()}.old")
        with contextlib.suppress(OSError):
            path.replace(aside)
        storage.tell_once(log, f"{path} is ignored and kept as {aside.name}: {reason}", about=path)
        return {}
