"""One traceback as terminals, notebooks, test runners and collectors of logs print it, all with the same frames."""

import html
import json
import textwrap
from collections.abc import Callable

import pytest

from planner.diagnose.log import incidents
from planner.units import MIB

SITE = "/usr/local/lib/python3.11/site-packages"
# path, line, qualified name, arguments, code
FRAMES = (
    ("/home/user/run/train.py", "31", "main", "", "trainer.train()"),
    (f"{SITE}/transformers/trainer.py", "2325", "Trainer.train", "self", "return inner_training_loop("),
    (f"{SITE}/transformers/trainer.py", "4071", "Trainer.training_step", "self, model", "self.accelerator.backward(l)"),
    (f"{SITE}/accelerate/accelerator.py", "2734", "Accelerator.backward", "self, loss", "loss.backward(**kwargs)"),
    (f"{SITE}/torch/_tensor.py", "647", "Tensor.backward", "self", "torch.autograd.backward("),
    (f"{SITE}/torch/autograd/graph.py", "829", "_engine_run_backward", "t", "return Variable._execution_engine.run("),
)
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 214.00 MiB. GPU 1 has a total capacity of 23.65 GiB "
    "of which 167.56 MiB is free. Including non-PyTorch memory, this process has 23.48 GiB memory in use."
)
BEGIN = "Traceback (most recent call last):"


def bare(name: str) -> str:
    return name.rpartition(".")[2]


def python(frames: tuple[tuple[str, ...], ...] = FRAMES, comma: str = ",") -> str:
    lines = [
        f'  File "{path}", line {line}{comma} in {bare(name)}\n    {code}\n    ^^^^'
        for path, line, name, _, code in frames
    ]
    return "\n".join([BEGIN, *lines, MESSAGE])


def prefixed(prefix: str) -> str:
    return "\n".join(prefix + line for line in python().split("\n"))


def counted(prefix: Callable[[int], str]) -> str:
    return "\n".join(prefix(number) + line for number, line in enumerate(python().split("\n")))


def wrapped(width: int) -> str:
    return "\n".join(
        line[at : at + width] for line in python().split("\n") for at in range(0, max(len(line), 1), width)
    )


def windows() -> str:
    return python(tuple(("C:" + path.replace("/", "\\"), *rest) for path, *rest in FRAMES))


def ipython(place: str, arrow: str = "-->") -> str:
    lines = ["-" * 75, "OutOfMemoryError                          Traceback (most recent call last)"]
    for path, line, name, arguments, code in FRAMES:
        lines += [place.format(path=path, line=line, name=name, function=bare(name), arguments=arguments)]
        lines += [f"    {int(line) - 2} # a remark", f"    {int(line) - 1} if True:", f"{arrow} {line}     {code}"]
        lines += [f"    {int(line) + 1} return", ""]
    return "\n".join([*lines, MESSAGE])


def rich(edge: str = "│", arrow: str = "❱") -> str:
    lines = ["╭───────────── Traceback (most recent call last) ─────────────╮"]
    for path, line, name, _, code in FRAMES:
        lines += [f"{edge} {path}:{line} in {bare(name):40} {edge}", f"{edge} {'':90} {edge}"]
        lines += [f"{edge}   {int(line) - 1} {edge}   {edge}   # a remark {'':40} {edge}"]
        lines += [f"{edge} {arrow} {line} {edge}   {edge}   {code:60} {edge}", f"{edge} {'':90} {edge}"]
    return "\n".join([*lines, "╰─────────────────────────────────────────────────────────────╯", MESSAGE])


def pytest_long() -> str:
    lines = ["_____________________________ test_training _____________________________", ""]
    for number, (path, line, name, _, code) in enumerate(FRAMES):
        last = number == len(FRAMES) - 1
        lines += [f"    def {bare(name)}(self, *arguments, **kwargs):", "        # a remark", f">       {code}"]
        lines += [f"E       {MESSAGE}"] if last else []
        lines += ["", f"{path}:{line}: {'OutOfMemoryError' if last else ''}", "_ " * 40]
    return "\n".join(lines)


def pytest_short() -> str:
    lines = [f"{path}:{line}: in {bare(name)}\n    {code}" for path, line, name, _, code in FRAMES]
    return "\n".join(["_____ test_training _____", *lines, f"E   {MESSAGE}"])


FORMS = {
    "Python": python(),
    "torchrun's ranks": prefixed("[rank1]: "),
    "torchrun's roles": prefixed("[trainer3]:"),
    "Ray": prefixed("(TaskRunner pid=4711, ip=10.0.0.7) "),
    "Ray without a name": prefixed("(pid=4711) "),
    "Ray in colours": prefixed("\x1b[36m(WorkerDict pid=4711)\x1b[0m "),
    "colours without the escape character": prefixed("[36m(WorkerDict pid=4711)[0m "),
    "SLURM": prefixed("12: "),
    "DeepSpeed's hosts": prefixed("node01: "),
    "mpirun": prefixed("[1,3]<stderr>:"),
    "SageMaker": prefixed("[1,mpirank:3,algo-1]<stderr>:"),
    "TorchX": prefixed("trainer/0 "),
    "Kubernetes' runtime": counted(lambda n: f"2026-05-01T12:00:{n:02}.123456789Z stderr F "),
    "kubectl logs --prefix": prefixed("[pod/trainer-0/pytorch] "),
    "docker compose": prefixed("trainer-1  | "),
    "GitHub Actions": counted(lambda n: f"2026-05-01T12:00:{n:02}.1234567Z "),
    "times with a zone": counted(lambda n: f"2026-05-01T12:00:{n:02}+02:00 "),
    "syslog": counted(lambda n: f"Nov 28 05:09:{n:02} gpu-box python3[4711]: "),
    "hydra": counted(lambda n: f"[2026-05-01 12:00:{n:02},123][__main__][ERROR] - "),
    "logging": counted(lambda n: f"2026-05-01 12:00:{n:02},123 - ERROR - root - "),
    "a quotation": prefixed("> "),
    "vLLM": counted(lambda n: f"(EngineCore_DP0 pid=71) ERROR 05-01 12:00:{n:02} [core.py:710] "),
    "a record of JSON a line": "\n".join(
        json.dumps({"log": line + "\n", "stream": "stderr"}) for line in python().split("\n")
    ),
    "a record of JSON": json.dumps({"severity": "ERROR", "labels": {"rank": 1}, "textPayload": python()}),
    "a record of JSON that was cut": json.dumps({"message": python(), "rank": 1})[:-3],
    "Python's repr": f"  warnings.warn('failed: {python()!r}')",
    "HTML": html.escape(python()),
    "Windows": windows(),
    "Windows' line ends": python().replace("\n", "\r\n"),
    "UTF-16": "".join(character + "\0" for character in python()),
    **{f"{width} columns": wrapped(width) for width in range(60, 130, 5)},
    "IPython": ipython("File {path}:{line}, in {name}({arguments})"),
    "IPython before 8": ipython("{path} in {function}({arguments})"),
    "Colab": ipython("[{path}](https://localhost:8080/#) in {function}({arguments})"),
    "VS Code": ipython("File [{path}:{line}](file://{path}), in {name}({arguments})"),
    "rich": rich(),
    "rich on Windows": rich("|", ">"),
    "pytest": pytest_long(),
    "pytest --tb=short": pytest_short(),
    "faulthandler": python(FRAMES[::-1], comma="").replace(BEGIN, "Current thread 0x7f (most recent call first):"),
    "after a bar": " 12%|█▏        | 12/100 [01:00<07:20,  5.00s/it]" + python(),
    "without indentation": textwrap.dedent("\n".join(line.lstrip() for line in python().split("\n"))),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_traceback_is_read_in_every_form(form):
    (incident,) = incidents("an earlier line\n" + FORMS[form] + "\n")
    assert (incident.kind, incident.phase, incident.sizes["tried"]) == ("gpu", "backward", 214 * MIB)
    line = "" if form in ("IPython before 8", "Colab") else ":2734"
    assert incident.where == f"accelerator.py{line} in backward"


def test_the_phase_may_be_in_the_traceback_of_an_error_that_it_caused():
    inner = f'{BEGIN}\n  File "/home/user/kernels.py", line 3, in launch\n    return torch.empty(8)\n{MESSAGE}\n'
    outer = python().replace(MESSAGE, "RuntimeError: the step failed")
    (incident,) = incidents(
        f"{inner}\nThe above exception was the direct cause of the following exception:\n\n{outer}\n"
    )
    assert (incident.phase, incident.where, incident.line) == ("backward", "kernels.py:3 in launch", 4)
