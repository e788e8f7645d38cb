"""Fetch the configs of Hugging Face's trl-jobs and write their settings as data: `python -m scripts.fetch_trl_jobs`."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

RELEASE = "trl-jobs==0.4.0"
FOLDER = "trl_jobs/configs/"
DATA = Path(__file__).parents[1] / "tests" / "data" / "trl_jobs.json"


def fetched() -> dict[str, dict[str, object]]:
    """The keys and values of each file of the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, RELEASE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            names = sorted(name for name in files.namelist() if name.startswith(FOLDER) and name.endswith(".yaml"))
            return {Path(name).stem: yaml.safe_load(files.read(name)) for name in names}


def main() -> None:
    files = fetched()
    first, *others = files.values()
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    own = {name: {key: value for key, value in keys.items() if key not in shared} for name, keys in files.items()}
    text = json.dumps({"source": f"{RELEASE}, {FOLDER}*.yaml", "shared": shared, "own": own}, indent=1)
    DATA.write_text(f"{text}\n", encoding="utf-8")
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
