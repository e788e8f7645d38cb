"""Record the bytes that each process of a started training keeps; Python imports this file where PYTHONPATH has its
folder (docs.python.org, `site`).

A launcher's processes have RANK; the launcher itself and everything else stay as they are.
"""

import json
import os
from pathlib import Path
from typing import Any

if "RANK" in os.environ and "RECORD_FOLDER" in os.environ:
    import transformers
    from sharded_worker import watch_of

    from probes.worker.cpu_accelerators import cpu_accelerators

    if "RECORD_SHARDED" in os.environ:
        accelerators = cpu_accelerators()  # kept, because its end is the block's end
        accelerators.__enter__()
    train = transformers.Trainer.train

    def train_and_record(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        watch = watch_of(trainer)
        trained = train(trainer, *args, **kwargs)
        rank, node = os.environ["RANK"], os.environ["GROUP_RANK"]
        record = Path(os.environ["RECORD_FOLDER"]) / f"{rank}.json"
        record.write_text(json.dumps({"node": int(node), "parts": watch.parts}), encoding="utf-8")
        return trained

    transformers.Trainer.train = train_and_record
