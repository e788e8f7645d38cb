"""Memory of head and loss: worked examples by hand, and what the real modules and trainers allocate."""

from typing import Any

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.layers.autograd import Tape
from planner.memory.layers.one_layer import take_peak
from planner.memory.losses.formulas import FORMULAS, Head, LossMemory, linear_backward
from planner.memory.losses.programs import EVERY, sort
from planner.methods import METHODS, Loss
from planner.models.catalogue import load_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

# 10 tokens, 8 of them labelled, 100,000 words, 16 features, 5 bytes per token that the final norm saves: all in 16 bits
# and trained; the same in float32 under 16-bit autocast; and that frozen. `FLOAT` is float32 without autocast.
HALF = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=100_000, hidden_size=16, hidden_width=2, weight_width=2,
    compute_width=2, trainable=True, norm_bytes=5,
)  # fmt: skip
UNCONVERTED = replace(HALF, converted=False)
FEW_SCORED = replace(HALF, labelled_tokens=HALF.labelled_tokens // 8)
CAST = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=100_000, hidden_size=16, hidden_width=4, weight_width=4,
    compute_width=2, trainable=True, norm_bytes=5,
)  # fmt: skip
FROZEN = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=100_000, hidden_size=16, hidden_width=4, weight_width=4,
    compute_width=2, trainable=False, norm_bytes=5,
)  # fmt: skip
# 5,000 tokens are two tiles, 40,000 words two chunks of 32,768 and 7,232; a single one has 1,000 words.
TILES = Head(
    tokens=5000, labelled_tokens=5000, logit_tokens=5000, vocab_size=40_000, hidden_size=16, hidden_width=4,
    weight_width=4, compute_width=2, trainable=False, norm_bytes=0,
)  # fmt: skip
FEW_WORDS = Head(
    tokens=5000, labelled_tokens=5000, logit_tokens=5000, vocab_size=1000, hidden_size=16, hidden_width=4,
    weight_width=4, compute_width=2, trainable=False, norm_bytes=0,
)  # fmt: skip
FEW_TOKENS = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=1000, hidden_size=16, hidden_width=4, weight_width=4,
    compute_width=2, trainable=False, norm_bytes=0,
)  # fmt: skip
FLOAT = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=100_000, hidden_size=16, hidden_width=4, weight_width=4,
    compute_width=4, trainable=True, norm_bytes=5,
)  # fmt: skip
CAPPED = Head(
    tokens=10, labelled_tokens=8, logit_tokens=10, vocab_size=1000, hidden_size=16, hidden_width=2, weight_width=2,
    compute_width=2, trainable=False, norm_bytes=0, softcapped=True,
)  # fmt: skip

# (forward, saved, backward), each a sum in the order of the source.
EXAMPLES: list[tuple[Loss, Head, tuple[int, int, int]]] = [
    # norm 50, labelled hidden states 256, statistics 8 x 32; last hidden states 320, 8 x 28, a tile 8 x 32,768 x 2;
    # float32 gradients 512 + 6,400,000, cast to 16 bits 256 + 3,200,000
    ("fused", HALF, (562 + 320 + 224 + 524_288, 562, 562 + 524_288 + 6_400_512 + 3_200_256)),
    # hidden states of 4 bytes; a 16-bit chunk of the head 32 x 32,768 and of hidden states 256; two chunks at once
    (
        "fused",
        CAST,
        (818 + 640 + 224 + 524_288 + 1_048_576 + 256, 818, 818 + 524_288 + 6_400_512 + 2_097_152 + 256),
    ),
    ("fused", FROZEN, (818 + 640 + 224 + 524_288 + 1_048_576 + 256, 818, 818 + 524_288 + 512 + 2_097_152 + 256)),
    # a tile of 4,096 tokens; 4,096 hidden states in 16 bits; all 40,000 words in two chunks
    (
        "fused",
        TILES,
        (
            480_000 + 320_000 + 140_000 + 268_435_456 + 1_048_576 + 131_072,
            480_000,
            480_000 + 268_435_456 + 320_000 + 1_280_000 + 131_072,
        ),
    ),
    # the chunk of the first tile is alive while the second one's is cast
    (
        "fused",
        FEW_WORDS,
        (
            480_000 + 320_000 + 140_000 + 268_435_456 + 32_000 + 131_072,
            480_000,
            480_000 + 268_435_456 + 320_000 + 64_000 + 131_072,
        ),
    ),
    # two float32 tiles of 8 x 32,768 x 4, the teacher's hidden states 256; in the backward pass casts at the end and
    # 16-bit gradients of the last 1,696 columns
    (
        "divergence",
        HALF,
        (
            562 + 320 + 224 + 2_097_152 + 256,
            562 + 256,
            562 + 256 + 2_097_152 + 6_400_512 + 3_200_256 + 27_136,
        ),
    ),
    # in the loop: a 16-bit gradient of two tiles, two chunks of the head, and 16-bit hidden states
    (
        "divergence",
        FROZEN,
        (
            818 + 640 + 224 + 2_097_152 + 1_048_576 + 256 + 512,
            818 + 512,
            818 + 512 + 2_097_152 + 512 + 2_097_152 + 256 + 1_048_576,
        ),
    ),
    # 8 tokens x 16 bytes x 100,000 words; backward: the sum of the head's gradients 3,200,000
    ("chunked_nll", HALF, (50 + 640 + 12_800_000, 50 + 320, 50 + 640 + 12_800_000 + 3_200_000)),
    # autocast's copy of the head; float32 gradients 6,400,000: two of them and their sum are more than the logits
    ("chunked_nll", CAST, (50 + 1280 + 12_800_000, 50 + 640, 50 + 1280 + 12_800_000 + 3_200_000 + 6_400_000)),
    # 8 x 14 x 100,000, and 6 bytes of each number of the head and of the hidden states beside 16-bit logits; backward:
    # autocast's copy, and the sum of the head's gradients
    (
        "chunked_float32",
        HALF,
        (50 + 640 + 9_600_000 + 1_600_000 + 768, 50 + 320, 50 + 640 + 11_200_000 + 3_200_000 + 3_200_000),
    ),
    # outside autocast: logits, log_softmax, exponentials and a product in float32 of 8 tokens; then gradients of the
    # logits and of hidden states with their copy, copy and gradient of the head in float32, and the sum in 16 bits
    (
        "candidates",
        HALF,
        (50 + 640 + 12_800_000, 50 + 320, 50 + 640 + 3_200_000 + 1_024 + 6_400_000 + 6_400_000 + 3_200_000),
    ),
    # 256 of 5,000 tokens at a time
    (
        "chunked_nll",
        FEW_WORDS,
        (640_000 + 4_096_000, 320_000, 640_000 + 4_096_000 + 32_000),
    ),
    # float32 without autocast casts nothing
    ("fused", FLOAT, (818 + 640 + 224 + 1_048_576, 818, 818 + 1_048_576 + 512 + 6_400_000)),
    # one tile has one chunk of all words, here the head in 16 bits
    (
        "fused",
        FEW_TOKENS,
        (768 + 640 + 224 + 524_288 + 32_000 + 256, 512 + 256, 512 + 256 + 524_288 + 512 + 32_000 + 256),
    ),
    # chunks of 1 token (10 / 6,250): hidden states and their gradients 640, the head's gradient 3,200,000; a chunk of
    # 200,000 and its product with its float32 copy 9,600,000
    (
        "liger",
        HALF,
        (50 + 640 + 3_200_000 + 200_000 + 9_600_000, 50 + 640 + 3_200_000, 50 + 640 + 3_200_000 + 320 + 3_200_000),
    ),
    # frozen: two chunks and autocast's copy of the head
    ("liger", FROZEN, (50 + 1280 + 200_000 + 200_000 + 3_200_000, 50 + 1280, 50 + 1280 + 640)),
    # 5,000 / 63 tokens are 80, so 128 at a time
    (
        "liger",
        FEW_WORDS,
        (640_000 + 256_000 + 256_000 + 32_000, 640_000, 640_000 + 320_000),
    ),
    # hidden states; in the backward pass their gradients, and the trained head's
    ("cut", HALF, (50 + 320, 50 + 320, 50 + 320 + 320 + 3_200_000)),
    ("cut", FROZEN, (50 + 640, 50 + 640, 50 + 640 + 640)),
    # the trained head keeps its input; 8, 6 and 10 bytes of a million logits
    ("logits", HALF, (50 + 320 + 8_000_000, 50 + 320 + 6_000_000, 50 + 320 + 10_000_000)),
    # and autocast's copy of the head
    ("logits", CAST, (3_200_370 + 8_000_000, 3_200_370 + 6_000_000, 3_200_370 + 10_000_000)),
    ("logits", FROZEN, (3_200_050 + 8_000_000, 3_200_050 + 6_000_000, 3_200_050 + 10_000_000)),
    # Liger writes the gradient of the chosen half over its copy: no log_softmax of 4 bytes in the forward pass
    ("logits", replace(HALF, liger_cross_entropy=True), (370 + 6_000_000, 370 + 6_000_000, 370 + 10_000_000)),
    # student's and teacher's logits over the temperature, and exponentials; topk's gradient beside three of logsumexp's
    ("most_likely", HALF, (370 + 12_000_000, 370 + 4_000_000, 370 + 20_000_000)),
    # student's and teacher's logits over the temperature; one gradient of the student's beside them
    ("sampled", HALF, (370 + 8_000_000, 370 + 4_000_000, 370 + 8_000_000)),
    # float32 logits, and of 8 tokens their multiple and its log_softmax
    ("scored", HALF, (370 + 4_000_000 + 6_400_000, 370 + 3_200_000, 370 + 9_600_000)),
    # float32 logits of both models; of 8 tokens the teacher's log_softmax, the student's, and its input
    ("weighted", HALF, (370 + 8_000_000 + 9_600_000, 370 + 3_200_000, 370 + 9_600_000)),
    # 7 tokens of an answer: float32 logits of both models, four times probabilities, both models' sorted ones with
    # their order, and 32 bytes a word while they are sorted; kept: probabilities, order, differences; in the backward
    # pass the gradient of the differences and their signs beside them
    (
        "universal",
        replace(HALF, teacher_vocab_size=100_000),
        (370 + 8_000_000 + 11_200_000 + 2 * 8_400_000 + 22_400_000, 370 + 11_200_000, 370 + 11_200_000 + 5_600_000),
    ),
    # the model's logits and their float32 copy, which is kept; in the backward pass one gradient beside it
    ("completion_logits", HALF, (370 + 6_000_000, 370 + 4_000_000, 370 + 8_000_000)),
    # float32 logits, the copy of the last third and its log_softmax (333,333 logits); three gradients of all logits
    ("triple", HALF, (370 + 6_666_664, 370 + 5_333_332, 370 + 12_000_000)),
    ("triple", replace(HALF, liger_cross_entropy=True), (370 + 6_000_000, 370 + 5_333_332, 370 + 12_000_000)),
    # float32 logits, the copy of a slice of them and log_softmax; log_softmax and two gradients
    ("preference", HALF, (370 + 12_000_000, 370 + 4_000_000, 370 + 12_000_000)),
    ("unpaired", HALF, (370 + 12_000_000, 370 + 4_000_000, 370 + 12_000_000)),
    # 16-bit logits, float32 copy and log_softmax; log_softmax and its gradient beside nll_loss's
    ("causal_lm", HALF, (370 + 10_000_000, 370 + 4_000_000, 370 + 12_000_000)),
    ("causal_lm", replace(FLOAT, converted=False), (690 + 8_000_000, 690 + 4_000_000, 690 + 12_000_000)),
    ("logits_cross_entropy", HALF, (370 + 12_000_000, 370 + 4_000_000, 370 + 12_000_000)),
    # without autocast: 16-bit logits, float32 copy, log_softmax; float32 logits, log_softmax, and a shifted copy
    ("logits_cross_entropy", replace(HALF, converted=False), (370 + 10_000_000, 370 + 4_000_000, 370 + 12_000_000)),
    ("logits_cross_entropy", replace(FLOAT, converted=False), (690 + 12_000_000, 690 + 4_000_000, 690 + 12_000_000)),
    ("jsd", HALF, (370 + 68_000_000, 370 + 28_000_000, 370 + 48_000_000)),
    # 2 bytes of 10,000 logits more for the soft cap's tanh
    ("logits", CAPPED, (20_000 + 80_000, 20_000 + 60_000, 20_000 + 100_000)),
    # forward: 16-bit logits and float32 copies 6 x 1,000,000, or 4 x 1,000,000 + 8 x 800,000; backward: 12 x 800,000
    # DeepSpeed's 16-bit logits: half of it
    ("logits", UNCONVERTED, (370 + 4_000_000, 370 + 3_000_000, 370 + 5_200_320)),
    # autocast to float16 around 16-bit logits: nll_loss takes and keeps a float32 copy of the half's log_softmax
    ("logits", replace(UNCONVERTED, autocasts_loss=True), (370 + 6_000_000, 370 + 5_000_000, 370 + 7_000_000)),
    ("jsd", UNCONVERTED, (370 + 34_000_000, 370 + 14_000_000, 370 + 24_000_000)),
    ("log_softmax", UNCONVERTED, (370 + 5_200_000, 370 + 1_600_000, 370 + 5_200_320)),
    ("log_softmax", HALF, (370 + 10_400_000, 370 + 3_200_000, 370 + 9_600_000)),
    # DDP's clone of the float32 logits
    ("log_softmax", FEW_SCORED, (370 + 6_000_000, 370 + 400_000, 370 + 6_000_000)),
    ("log_softmax", replace(FEW_SCORED, cloned=True), (370 + 8_000_000, 370 + 400_000, 370 + 6_000_000)),
    ("log_softmax", CAPPED, (20_000 + 104_000, 20_000 + 32_000, 20_000 + 96_000)),
    # hidden states 320; input and output of the norm; gradient of the hidden states
    ("score", HALF, (50 + 640, 50 + 320, 50 + 640)),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "head", "expected"), EXAMPLES)
def test_worked_examples(loss: Loss, head: Head, expected: tuple[int, int, int]) -> None:
    memory = FORMULAS[loss](head)
    assert (memory.forward, memory.saved, memory.backward) == expected


def test_an_evaluation_keeps_neither_the_heads_input_nor_its_copy() -> None:
    jsd, logits, cast = FORMULAS["jsd"](HALF), FORMULAS["logits"](HALF), FORMULAS["logits"](CAST)
    assert (jsd.evaluated_bytes, logits.evaluated_bytes) == (50 + 48_000_000, 50 + 8_000_000)
    assert cast.forward - cast.evaluated_bytes == CAST.weight_cast_bytes + CAST.saved_hidden_bytes > 0


@pytest.mark.parametrize(("loss", "bytes_per_logit"), [("log_softmax", 10.4), ("logits_cross_entropy", 10)])
def test_an_evaluation_takes_what_its_loss_does_without_gradients(loss: Loss, bytes_per_logit: float) -> None:
    """Float32 copies and twice 8 of 10 tokens; 16-bit logits, their float32 copy and log_softmax."""
    assert FORMULAS[loss](CAST).evaluated_bytes == 50 + bytes_per_logit * 1_000_000


def test_a_trained_head_has_the_gradients_of_logits_input_and_weight() -> None:
    """Without autocast's copy: 2 bytes of 10 x 100,000 logits, 10 x 16 hidden states and 100,000 x 16 weights."""
    assert linear_backward(HALF, 1_000_000) == 2_000_000 + 320 + 3_200_000


@pytest.mark.parametrize(
    ("loss", "head", "beside", "frozen"),
    [
        # without a saved norm; of the policy's head what is saved stays beside a frozen model
        ("fused", HALF, 562, 320 + 224 + 524_288 + 512),
        ("logits", HALF, 370 + 4_000_000, 2_000_000),  # float32 logits; what is not saved
        ("logits", CAPPED, 20_000 + 40_000, 20_000),
        ("log_softmax", HALF, 370 + 3_200_000, 10_400_000),
        ("most_likely", HALF, 370 + 4_000_000, 8_000_000),  # the teacher's logits and their multiple
        ("preference", HALF, 370 + 8_000_000, 12_000_000),  # log_softmax, and the logits for a metric
        ("unpaired", HALF, 370 + 8_000_000, 16_000_000),  # and the rows' logits beside the pass over the KL batch
    ],
)
def test_what_stays_beside_a_frozen_model_and_what_that_takes(loss: Loss, head: Head, beside: int, frozen: int) -> None:
    memory = FORMULAS[loss](head)
    assert (memory.beside_bytes, memory.frozen_bytes) == (beside, frozen)


# results/emulated.md: PyTorch allocated 13.95 GiB, of which 16-bit logits' divergence 9.9.
def test_deepspeed_gives_the_trainer_16_bit_logits() -> None:
    student, teacher = load_model("Qwen2.5-1.5B"), load_model("Qwen2.5-0.5B")
    candidate = Candidate(
        model=student, method="gkd", tuning="lora", dtype="bfloat16", max_length=1024, prompt_length=992,
        max_completion_length=32, lmbda=0.0, teacher_model=teacher, per_device_train_batch_size=2, padded=False,
        sharding="zero2", num_processes=4,
    )  # fmt: skip
    cluster = parse_cluster("4xA100-80G", None)
    deepspeed, ddp = (
        next(phase.components["loss"] for phase in estimate(each, cluster).gpus[0].phases if phase.name == "loss")
        for each in (candidate, replace(candidate, sharding="ddp"))
    )
    assert ddp - deepspeed == 34 * 2 * 1024 * student.vocab_size


def test_every_loss_has_an_example() -> None:
    assert {loss for loss, _, _ in EXAMPLES} == FORMULAS.keys()


# -- the real modules on the CPU ---------------------------------------------------------------------------------------

VOCABULARY, FEATURES, TOKENS = 3000, 1024, 1024
SMALL_TENSORS = 0.012  # labels, masks, sorted indices: 8 bytes per token beside 1,024 of a hidden state and more


def tracked(loss: Loss, head: Head) -> LossMemory:
    """Bytes of head and loss as the tracker sees them, after a last norm that saves nothing."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from probes.layers.cuda.substitutions import EVERYWHERE
    from probes.layers.fake_tensors.tracker import STAYS, Tracker
    from probes.step.collector import collector_off

    dtype = {2: torch.bfloat16, 4: torch.float32}[head.weight_width]

    class LastNorm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, layers: Any) -> Any:
            return torch.zeros_like(layers)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return None

    words = 1 if loss == "score" else head.vocab_size
    weight = torch.nn.Parameter(torch.zeros(words, head.hidden_size, dtype=dtype), requires_grad=head.trainable)
    weight.grad = torch.zeros_like(weight) if head.trainable else None
    residents = [each for each in (weight, weight.grad) if each is not None]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=head.compute_width != head.weight_width)
    before = torch.zeros(2, head.tokens // 2, head.hidden_size, dtype=dtype, requires_grad=True)
    # the first call imports modules, and errors that they catch keep the caller's tensors
    REAL[loss](lambda: LastNorm.apply(before), weight, autocast)  # type: ignore[no-untyped-call]
    with collector_off(), Tracker(workspaces=EVERYWHERE) as tracker:
        for tensor in residents:
            tracker.add_resident(tensor, "weights")
        tracker.enter_phase("forward")
        layers = torch.zeros(2, head.tokens // 2, head.hidden_size, dtype=dtype, requires_grad=True)
        computed = REAL[loss](lambda: LastNorm.apply(layers), weight, autocast)  # type: ignore[no-untyped-call]
        tracker.enter_phase("backward")
        saved = sum(record.size_bytes for record in tracker.records if record.died == STAYS)
        computed.backward()
    outside = sum(tensor.nbytes for tensor in residents) + layers.nbytes
    peaks = peaks_of(tracker.trace().allocations)
    return LossMemory(forward=peaks["forward"] - outside, saved=saved - outside, backward=peaks["backward"] - outside)


def peaks_of(allocations: Any) -> dict[str, int]:
    """The most bytes that are alive after an allocation of each phase."""
    events = [(each.born, each.size_bytes, each.phase) for each in allocations]
    events += [(each.died, -each.size_bytes, each.phase) for each in allocations]
    total, peaks = 0, dict[str, int]()
    for _, size_bytes, phase in sorted(events):
        total += size_bytes
        if size_bytes > 0:
            peaks[phase] = max(peaks.get(phase, 0), total)
    return peaks


def chunked_nll(hidden: Any, weight: Any, autocast: Any) -> Any:
    import torch
    from earlier_losses import chunked_cross_entropy

    with autocast:
        last = hidden()
        return chunked_cross_entropy(last, weight, torch.ones(last.shape[:2], dtype=torch.long))


def chunked_float32(hidden: Any, weight: Any, autocast: Any) -> Any:
    import torch
    from earlier_losses import chunked_cross_entropy

    with autocast:
        last = hidden()
        return chunked_cross_entropy(last, weight, torch.ones(last.shape[:2], dtype=torch.long), float32=True)


def preference(hidden: Any, weight: Any, autocast: Any) -> Any:
    """llamafactory 0.9.5, train/trainer_utils.py, `get_batch_logps`, of float32 logits."""
    import torch

    with autocast:
        logits = torch.nn.functional.linear(hidden(), weight)
    logits = logits.float()
    labels = torch.zeros(logits.shape[:2], dtype=torch.long)[:, 1:, None]
    return torch.gather(logits[:, :-1].log_softmax(-1), 2, labels).sum()


def causal_lm(hidden: Any, weight: Any, autocast: Any) -> Any:
    """A causal model's forward pass under accelerate, whose float32 logits transformers' Trainer drops."""
    return loss_and_logits(hidden, weight, autocast)[0]


def loss_and_logits(hidden: Any, weight: Any, autocast: Any) -> tuple[Any, Any, Any]:
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    with autocast:
        logits = torch.nn.functional.linear(hidden(), weight)
        labels = torch.ones(logits.shape[:2], dtype=torch.long)
        loss = ForCausalLMLoss(logits, labels, len(weight))
    return loss, logits.float(), labels  # accelerate's copy


def logits_cross_entropy(hidden: Any, weight: Any, autocast: Any) -> Any:
    """The same, and the accuracy that trl 1.0, trainer/sft_trainer.py, `compute_loss` adds."""
    import torch

    loss, logits, labels = loss_and_logits(hidden, weight, autocast)
    with torch.no_grad():
        shifted = logits[..., :-1, :].contiguous()
        (shifted.argmax(-1) == labels[..., 1:]).sum()
    return loss


def score(hidden: Any, weight: Any, autocast: Any) -> Any:
    """The head of a sequence classifier, and the loss of trl 1.16, trainer/reward_trainer.py, `compute_loss`."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Layers(torch.nn.Module):
        def forward(self, *inputs: Any, **others: Any) -> Any:
            return BaseModelOutputWithPast(last_hidden_state=hidden())

    config = LlamaConfig(
        hidden_size=weight.shape[1], intermediate_size=1, num_hidden_layers=0, num_attention_heads=1, vocab_size=8,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForSequenceClassification(config)
    model.model, model.score.weight = Layers(), weight
    with autocast:
        rewards = model(input_ids=torch.ones(2, TOKENS // 2, dtype=torch.long)).logits
    return -torch.nn.functional.logsigmoid(rewards[0] - rewards[1]).mean()


REAL: dict[Loss, Any] = {
    "chunked_nll": chunked_nll,
    "chunked_float32": chunked_float32,
    "preference": preference,
    "causal_lm": causal_lm,
    "logits_cross_entropy": logits_cross_entropy,
    "score": score,
}


def head_of(width: int, compute: int, trainable: bool) -> Head:
    return Head(
        tokens=TOKENS, labelled_tokens=TOKENS, logit_tokens=TOKENS, vocab_size=VOCABULARY, hidden_size=FEATURES,
        hidden_width=width, weight_width=width, compute_width=compute, trainable=trainable, norm_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(("width", "compute"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("loss", ["chunked_nll", "preference", "causal_lm", "logits_cross_entropy"])
def test_logits_take_what_the_real_modules_do(loss: Loss, width: int, compute: int, trainable: bool) -> None:
    head = head_of(width, compute, trainable)
    real, memory = tracked(loss, head), FORMULAS[loss](head)
    assert memory.forward == pytest.approx(real.forward, rel=SMALL_TENSORS)
    assert memory.saved == pytest.approx(real.saved, rel=SMALL_TENSORS)
    assert memory.backward == pytest.approx(real.backward, rel=SMALL_TENSORS)


# Autocast of the CPU computes log_softmax in bfloat16, that of CUDA in float32: results/emulated_branches.jsonl has it.
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_float32_copy_of_the_head_takes_what_the_real_function_does(width: int, trainable: bool) -> None:
    head = replace(head_of(width, width, trainable), converted=False)
    real, memory = tracked("chunked_float32", head), FORMULAS["chunked_float32"](head)
    assert memory.forward == pytest.approx(real.forward, rel=SMALL_TENSORS)
    assert memory.saved == pytest.approx(real.saved, rel=SMALL_TENSORS)
    assert memory.backward == pytest.approx(real.backward, rel=SMALL_TENSORS)


@pytest.mark.parametrize("loss", ["preference", "unpaired"])
def test_logits_that_llama_factory_makes_float32_are_so_under_deepspeed_too(loss: Loss) -> None:
    head = head_of(2, 2, False)
    assert FORMULAS[loss](replace(head, converted=False)) == FORMULAS[loss](head)


def test_a_score_keeps_its_input_and_makes_its_gradient() -> None:
    head = head_of(2, 2, True)
    real, memory = tracked("score", head), FORMULAS["score"](head)
    hidden = 2 * TOKENS * FEATURES
    # the norm's input is not counted by the tracker here
    assert memory.forward == pytest.approx(real.forward + hidden, rel=SMALL_TENSORS)
    assert memory.saved == pytest.approx(real.saved, rel=SMALL_TENSORS)
    assert memory.backward == pytest.approx(real.backward, rel=SMALL_TENSORS)


@pytest.mark.parametrize(
    ("trl_version", "loss"),
    [("1.0", "logits_cross_entropy"), ("1.6", "logits_cross_entropy"), ("1.7", "chunked_float32"),
     ("1.12", "chunked_float32"), ("1.13", "chunked_nll"), ("1.14", "chunked_nll"), ("1.15", "fused")],
)  # fmt: skip
def test_the_loss_of_sft_is_the_default_of_the_release(trl_version: str, loss: str) -> None:
    """Source: the wheels of TRL, trainer/sft_config.py, `SFTConfig.loss_type`, sft_trainer.py, `_chunk`."""
    assert METHODS["sft"].loss_with(trl_version, use_liger_kernel=False) == loss


@pytest.mark.parametrize(
    ("rows", "width", "bytes_a_word"),
    # A100-80G, emulated, torch 2.13: a row of 151,936 words, sorted in descending order.
    [(1, 4, 32.4), (31, 4, 44.5), (127, 4, 44.5), (128, 4, 32.0), (511, 4, 32.0), (127, 2, 38.4), (128, 2, 28.1)],
)
def test_a_sort_takes_what_it_took_on_an_emulated_card(rows: int, width: int, bytes_a_word: float) -> None:
    tape = Tape()
    before = tape.snapshot()
    found = sort(tape, tape.leaf(EVERY, width), rows)
    peak = take_peak(tape, before).at(1, 0)[0] - width  # the input
    assert found.width == width and peak == pytest.approx(bytes_a_word, rel=0.03)


def test_a_teacher_with_another_tokenizer_keeps_its_own_vocabulary() -> None:
    """GOLD resizes the teacher's embeddings to the student's without `use_uld_loss`."""
    head = Head(
        tokens=64, labelled_tokens=32, logit_tokens=64, vocab_size=1000, hidden_size=8, hidden_width=2, weight_width=2,
        compute_width=2, trainable=False, norm_bytes=0, rows=2, teacher_vocab_size=1000,
    )  # fmt: skip
    wider = replace(head, teacher_vocab_size=2000)
    assert FORMULAS["universal"](head).forward < FORMULAS["universal"](wider).forward
    assert FORMULAS["jsd"](head) == FORMULAS["jsd"](wider)
