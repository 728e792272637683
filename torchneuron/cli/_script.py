"""Running a user's script inside a command."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path


def run_script(script: str, arguments: list[str], as_module: bool) -> int:
    """Runs `script` as `__main__`; returns its exit code. A traceback shows the script's frames alone.

    A child that the script forked ends here with its own exit code: only the script's process reports.
    """
    process = os.getpid()
    code = _run(script, arguments, as_module)
    if os.getpid() != process:
        raise SystemExit(code)
    return code


def _run(script: str, arguments: list[str], as_module: bool) -> int:
    sys.argv = [script, *arguments]
    try:
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0
