"""The phase of frames that no table knows, from the words in names of functions and files."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

from msgspec import Struct

from planner.diagnose.frames import Frame
from planner.quantities import Phase

# "trains": a part of a training step, of which no name says which; "program": a training as a whole, with its start.
Purpose = Phase | Literal["trains", "program"]


class WordRow(Struct, frozen=True, kw_only=True):
    """Names of functions that tell a purpose: those with one of `words`, one of `beside` if any, and none of `but`."""

    purpose: Purpose
    words: frozenset[str]
    beside: frozenset[str] = frozenset()
    but: frozenset[str] = frozenset()
    path: str = ""  # a regular expression that the file must match

    def names(self, words: frozenset[str], path: str) -> bool:
        """True if a function with these words in its name, in this file, has the purpose."""
        return (
            not self.words.isdisjoint(words)
            and (not self.beside or not self.beside.isdisjoint(words))
            and self.but.isdisjoint(words)
            and (not self.path or re.search(self.path, path) is not None)
        )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DATA = _words(
    "data dataset datasets dataloader dataloaders batch batches collate image images video audio tokenizer tokens "
    "example examples row rows sample samples mask masks ids position positions inputs input config args arguments "
    "kwargs schema metrics env environment"
)
PARTS = _words(
    "model models module modules weight weights checkpoint checkpoints ckpt pretrained engine policy actor critic ref "
    "reference adapter adapters lora layer layers parameter parameters params network net unet vae encoder decoder "
    "backbone pipeline transformer llm lm tower state states optimizer experts expert teacher student trainer"
)
# A name of a part that a step makes, which is none that a run loads.
OF_STEP = DATA | _words(
    "output outputs loss losses logits cache hidden embeds grad grads gradient gradients step forward"
)
# Functions that do everything inside of them for one purpose. A name with two purposes has none.
PURPOSES = (
    WordRow(
        purpose="evaluation",
        words=_words("evaluate evaluation eval evaluating validate validating validation val"),
        but=DATA,
    ),
    WordRow(purpose="evaluation", words=frozenset({"metrics"}), beside=_words("compute calculate")),
    WordRow(
        purpose="rollout",
        words=_words("generate generation rollout rollouts completion completions generating"),
        but=_words(
            "mask masks position positions embedding embeddings embeds dataset config anchors grid ids timesteps"
        ),
    ),
    WordRow(
        purpose="rollout",
        words=frozenset({"sample"}),
        beside=_words("actions sequences images latents"),
        but=_words("loss"),
    ),
    WordRow(purpose="score", words=_words("reward rewards"), but=PARTS | _words("train loss update save init setup")),
    WordRow(
        purpose="score",
        words=_words("ref reference old"),
        beside=_words("logp logps logprob logprobs log prob probs"),
        but=_words("train loss update save init setup"),
    ),
    WordRow(
        purpose="weight_sync",
        words=_words("sync synchronize broadcast push transfer update refit send"),
        beside=_words("weight weights"),
        but=_words("module states ema bema avg average target ref reference tied"),
    ),
    WordRow(
        purpose="weight_sync",
        words=_words("sync synchronize refit"),
        beside=_words("model policy"),
        but=_words("target ref reference ema avg average init initial"),
    ),
    WordRow(
        purpose="save",
        words=_words("save saving export exporting serialize consolidate writing"),
        but=_words("for backward image images figure config args log logs plot activation activations tensors hidden"),
    ),
    WordRow(
        purpose="save", words=_words("merge merging unload"), beside=_words("lora adapter adapters weights model peft")
    ),
    WordRow(
        purpose="load",
        words=_words(
            "load loading build building create creating make init initialize initializing instantiate instantiating "
            "setup construct prepare materialize convert converting wrap quantize quantizing shard restore restoring "
            "resume allocate reload onload"
        ),
        beside=PARTS,
        but=OF_STEP,
    ),
    WordRow(
        purpose="load", words=frozenset({"get"}), beside=_words("model models"), but=OF_STEP | _words("state states")
    ),
    WordRow(purpose="load", words=frozenset({"pretrained"})),
    WordRow(
        purpose="trains",
        words=_words("train training update learn optimize finetune"),
        beside=_words("step steps epoch batch minibatch microbatch policy actor critic one iteration iter"),
    ),
    WordRow(purpose="trains", words=frozenset({"forward"}), beside=frozenset({"backward"})),
    WordRow(purpose="program", words=_words("train training main fit finetune finetuning run learn trainer")),
)
OPTIMIZERS = (
    r"(?:^|[/_])(?:optim(?!um)\w*|\w*adam\w*|lion|muon|sgd|adafactor|shampoo|soap|galore|lomo|apollo|adagrad)"
    r"(?:[/._]|$)"
)
# Functions that do a part of a step, of which the innermost decides.
WORK = (
    WordRow(purpose="optimizer_step", words=_words("step update init"), path=OPTIMIZERS),
    WordRow(purpose="optimizer_step", words=frozenset({"optimizer"}), beside=frozenset({"step"})),
    WordRow(
        purpose="optimizer_step",
        words=_words("optimizer optim"),
        beside=_words("state states"),
        but=frozenset({"dict"}),
    ),
    WordRow(
        purpose="optimizer_step",
        words=_words("adam adamw adafactor muon lion foreach newtonschulz zeropower unscale lamb shampoo"),
        but=_words("gather reduce load"),
    ),
    WordRow(purpose="optimizer_step", words=frozenset({"clip"}), beside=_words("grad grads gradient gradients norm")),
    WordRow(purpose="backward", words=_words("backward bwd"), but=_words("save forward for register")),
    WordRow(
        purpose="backward",
        words=_words("grad grads gradient gradients"),
        beside=_words("reduce allreduce sync accumulate average reducer buckets bucket"),
    ),
)
# The same, of which backward and optimizer's step may call any.
WEAK_WORK = (
    # what computes a loss most often runs the model, too
    WordRow(purpose="loss", words=_words("loss losses"), but=_words("compute calculate get training forward")),
    WordRow(
        purpose="loss",
        words=_words("entropy logp logps logprob logprobs logsoftmax kl nll perplexity crossentropy"),
        but=frozenset({"forward"}),
    ),
    WordRow(
        purpose="forward",
        words=_words(
            "forward fwd attention attn mlp ffn embed embedding embeddings linear conv rope rotary norm rmsnorm "
            "layernorm rms decoder encoder logits"
        ),
        but=_words("backward clip save load init loss entropy make create build"),
    ),
)
# Functions in which a module is made or moved, by a program before it trains or by a step as it runs.
EVALUATES = r"(?:^|[/_])(?:eval|evaluat|validat)\w*(?:\.py|/[\w-]+\.py)$"  # a file that only evaluates, or its folder
MADE = (
    r"torch/nn/modules/module\.py (?:_apply|to|cuda|half|bfloat16)|"
    r"\S*(?:model|module|layer|network|linear|attention|coder)\S* __init__"
)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
CALLED = re.compile(r"(?<![\w])([a-z_]\w{1,60})\(")  # a function; a class's name has capitals, and makes an object


@cache
def _of_name(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in WORD.findall(name))


def _purpose(rows: Sequence[WordRow], frame: Frame) -> Purpose | None:
    """The purpose of a frame's function; None if its name has none, or several."""
    words = _of_name(frame.function)
    if "maybe" in words:  # one of several
        return None
    found = [row.purpose for row in rows if row.names(words, frame.path)]
    return found[0] if len(set(found)) == 1 or "program" in found else None


def purpose_of(frames: Sequence[Frame]) -> Purpose | None:
    """The phase that the names in a traceback tell, read from the innermost frame outward; None if none tells one.

    A function with a purpose of its own, as to evaluate or to save, decides for all inside of it, the innermost of
    them first; an evaluation for what it generates or scores, too. Within a training step the innermost backward pass
    or optimizer's step decides, else the innermost loss or forward pass. A module that is made inside of a training
    step is of no known part of it; elsewhere it is loading.
    """
    strong = weak = within = None
    made = False
    for frame in _with_called(frames):
        strong = strong or _purpose(WORK, frame)
        weak = weak or _purpose(WEAK_WORK, frame)
        made = made or (weak is None and re.search(f"(?:{MADE})$", f"{frame.path} {frame.function}") is not None)
        purpose = _purpose(PURPOSES, frame)
        if purpose in (None, "program") and re.search(EVALUATES, frame.path):
            purpose = "evaluation"
        if purpose in ("rollout", "score") and strong is None:
            within = within or purpose
        elif purpose in ("trains", "program"):
            return strong or within or weak or ("load" if made and purpose == "program" else purpose)
        elif purpose is not None and (strong is None or purpose in ("save", "weight_sync")):
            return purpose
    return strong or within or weak or ("load" if made else None)


# The words with which a line says what a program does now, before a name or a figure; and the title of a bar.
SAID = re.compile(
    r"^\W{0,4}(?:(?:[Nn]ow|[Ss]tart(?:ing|ed)?|[Bb]egin(?:ning)?) )?(?:to )?(?P<verb>[A-Za-z]{3,12}ing)\b[\w -]{0,80}"
)
TITLE = re.compile(r"^\s*([A-Z][\w /-]{2,60}?)(?: *\[[^\]]{0,20}\])?:? {1,3}\d{1,3}%\|")
SAID_WORDS = (
    *("oading ", "nitializ", "uilding ", "reating ", "nstantiating ", "uantizing ", "onverting ", "estoring "),
    *("aving ", "riting ", "xporting ", "erging ", "valuating", "alidating", "enerating ", "raining"),
)
# Of settings, results and small files.
NOT_NOW = _words(
    "every extension split cached processor vocab vocabulary wandb log logs results metrics skipping enabled"
)


def purpose_of_line(text: str) -> Purpose | None:
    """The purpose that a line says, such as "Loading model from disk", or that the title of its bar names."""
    title = TITLE.match(text)
    match = title or SAID.match(text)
    if match is None or not NOT_NOW.isdisjoint(_of_name(match[0])):
        return None
    is_verb = title or _purpose(PURPOSES, Frame("", "", f"{match['verb']} model"))  # else another word has a purpose
    return _purpose(PURPOSES, Frame("", "", match[0])) if is_verb else None


def _with_called(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The frames, innermost first, before them what the innermost one calls; what a line of code alone calls."""
    for number, frame in enumerate(reversed(frames)):
        if number == 0 if frame.function else frame.source[:4].isspace():
            for name in reversed(CALLED.findall(frame.source)):
                yield Frame("", "", name)
        if frame.function:
            yield frame
