"""The files of docs/cluster.md, checked by the tools that read them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCUMENT = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", DOCUMENT, flags=re.DOTALL | re.MULTILINE)


def file_with(text: str) -> str:
    """The one file of the document that has this text."""
    (found,) = [block for _, block in BLOCKS if text in block]
    return str(found)


def test_ray_up_takes_the_cluster_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="Ray is not installed")
    util.validate_config(util.fillout_defaults(yaml.safe_load(file_with("cluster_name"))))


def test_containers_of_the_kuberay_cluster_have_images_and_limits() -> None:
    """Structure alone: the schema of RayCluster is in a Kubernetes cluster with KubeRay, and in no package."""
    spec = yaml.safe_load(file_with("kind: RayCluster"))["spec"]
    groups: list[dict[str, Any]] = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources"} <= set(container)


@pytest.mark.parametrize("check", [("bash", "-n"), ("shellcheck", "--severity=style")], ids=["bash", "shellcheck"])
def test_the_slurm_file_is_a_script(check: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(check[0]) is None:
        pytest.skip(f"{check[0]} is not installed")
    script = tmp_path / "ray.sh"
    script.write_text(file_with("#SBATCH"), encoding="utf-8")
    done = subprocess.run([*check, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
