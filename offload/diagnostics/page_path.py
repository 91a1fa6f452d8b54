"""Checks where a command is to write a page, before the work that comes first."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

__all__ = ["page_path"]


def page_path(text: str) -> Path:
    """Return the path of a page to be written, as argparse's `type`: a script's step takes long, and comes first.

    Raises
    ------
    argparse.ArgumentTypeError
        Its folder does not exist, or it is a folder itself.
    """
    try:
        path = Path(text).absolute()  # the script may change the folder
    except FileNotFoundError as error:  # the present folder has been deleted
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist; create it or name another")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    except OSError as error:  # for example, the name is too long
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise argparse.ArgumentTypeError(f"{text}: this is a folder; name a file in it")
    return path
