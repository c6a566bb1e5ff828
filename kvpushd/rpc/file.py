# SPDX-License-Identifier: Apache-2.0
"""A file of the daemon's, told apart from another one at the same path."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class File:
    """Its path, and its inode: as long as it is open, or a socket that is bound to it is, none that another
    puts there has the same."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> File:
        """The one that was found, which is at `path`, or is going to be."""
        return cls(path, found.st_dev, found.st_ino)

    def is_there(self) -> bool:
        """Its path leads to it, for all that can be seen: False only where it is gone, or another's."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    def remove(self) -> None:
        """Unlinks it, unless it is gone or another's, or may not be removed: whoever comes next makes way.
        For calling before it is closed."""
        if self.is_there():
            with contextlib.suppress(OSError):
                self.path.unlink()
