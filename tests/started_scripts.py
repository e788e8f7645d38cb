"""Starts what exported folders start, one after the other in this process: `python started_scripts.py FOLDERS.json`.

The file has, per start, the folder, the script (a file, or a module of TRL) and arguments of the command line. Prints
a line of JSON per start: the error if it ended with one, and what it said of deprecated names.
"""

import gc
import json
import logging
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


class Heard(logging.Handler):
    """Keeps messages about names that a later release drops."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecated" in message or "will be removed" in message:
            self.messages.append(message)


def started(folder: str, script: str, arguments: list[str]) -> dict[str, Any]:
    """Run a script as `python SCRIPT --config train.yaml ARGUMENTS` does in its folder."""
    gc.freeze()  # trainers call gc.collect, which takes a second for the imports of the scripts before
    heard, said = Heard(), ""
    for name in ("transformers", "trl", "accelerate", "peft"):
        logging.getLogger(name).addHandler(heard)
    os.chdir(folder)
    sys.argv = [script, "--config", "train.yaml", *arguments]
    sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if script.endswith(".py"):
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
    except BaseException:
        said = traceback.format_exc()
    sys.path.remove(folder)
    sys.modules.pop("rewards", None)
    old = [str(each.message) for each in caught if issubclass(each.category, (FutureWarning, DeprecationWarning))]
    return {"error": said, "deprecated": old + heard.messages}


for start in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
    print("\n" + json.dumps(started(**start)), flush=True)
