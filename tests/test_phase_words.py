"""Tracebacks of libraries that no table knows: the phase is in the names of functions."""

import pytest

from planner.diagnose.code_phases import phase_of
from planner.diagnose.frames import Frame
from planner.diagnose.tracebacks import activity_of

# "file function" from the outermost frame inward, and " | " before the innermost one's code -> the phase.
UNKNOWN = {
    "run.py main > acme/loop.py evaluate_checkpoint > acme/nets/mixer.py forward": "evaluation",
    "run.py main > acme/loop.py train_epoch > acme/loop.py run_validation > acme/nets/mixer.py forward": "evaluation",
    "acme/eval.py run_eval > acme/decode.py generate_answers > acme/nets/mixer.py forward": "evaluation",
    "acme/rl.py collect > acme/rl.py generate_rollouts_async > acme/nets/mixer.py forward": "rollout",
    "acme/rl.py train_step > acme/rl.py sample_actions > acme/nets/mixer.py forward": "rollout",
    "acme/rl.py main > acme/rl.py compute_rewards_batched > acme/nets/scorer.py forward": "score",
    "acme/rl.py main > acme/rl.py get_old_logps > acme/nets/mixer.py forward": "score",
    "acme/rl.py train > acme/rl.py broadcast_policy_weights > acme/comm.py gather": "weight_sync",
    "acme/loop.py train > acme/io.py write_and_save_weights > acme/io.py consolidate_shards": "save",
    "acme/export.py main > acme/export.py merge_lora_into_model > acme/layers.py fuse": "save",
    "acme/run.py main > acme/builder.py build_policy_network > acme/layers.py alloc": "load",
    "acme/run.py main > acme/nets/model.py __init__": "load",
    "acme/run.py main > acme/io.py restore_checkpoint > acme/io.py read": "load",
    "acme/loop.py train_step > acme/optim/prodigy.py step > acme/optim/prodigy.py update_moments": "optimizer_step",
    "acme/loop.py train_step > acme/muon.py zeropower_via_newtonschulz5": "optimizer_step",
    "acme/loop.py train_step > acme/grads.py clip_gradients": "optimizer_step",
    "acme/loop.py train_step > acme/ops.py fused_gate_bwd": "backward",
    "acme/loop.py train_step > acme/parallel.py all_reduce_gradients": "backward",
    "acme/loop.py train_step > acme/losses.py chunked_entropy": "loss",
    "acme/loop.py train_step > acme/losses.py contrastive_loss": "loss",
    "acme/loop.py train_step > acme/ops.py rotary_embed": "forward",
    "acme/loop.py train_step > acme/loop.py compute_loss > acme/kernels.py swiglu_fwd": "forward",
    "acme/loop.py main | model_engine.backward_pass(loss)": "backward",
    "acme/loop.py main | out = block.attention_heads(x)": "forward",
}
# A part of a step that no name tells; and what tells nothing.
UNTOLD = {
    "acme/loop.py main > acme/loop.py train_step > acme/ops.py launch": "trains",
    "acme/loop.py main > acme/loop.py forward_backward_step > acme/ops.py launch": "trains",
    "acme/loop.py main > acme/loop.py train > acme/ops.py launch": "",
    "acme/loop.py main > acme/data.py load_dataset > acme/data.py build_batches": "",
    "acme/loop.py main > acme/config.py validate_args": "",
    "acme/loop.py train_epoch > acme/loop.py maybe_log_save_evaluate > acme/comm.py gather": "trains",
    "acme/loop.py main > acme/comm.py broadcast_model": "",
    "acme/loop.py main > acme/ema.py update_ema_weights": "",
    "acme/loop.py main > optimum/acme.py init_exllama": "",
}


def frames(stack: str) -> list[Frame]:
    calls, _, code = stack.partition(" | ")
    found = [Frame(f"/venv/{path}", "7", function) for path, function in map(str.split, calls.split(" > "))]
    return [*found[:-1], found[-1]._replace(source=code)]


@pytest.mark.parametrize("stack", UNKNOWN)
def test_names_tell_the_phase_of_a_library_that_nobody_named(stack):
    assert phase_of(frames(stack)) == UNKNOWN[stack]


@pytest.mark.parametrize("stack", UNTOLD)
def test_names_that_tell_no_phase_are_not_taken_for_one(stack):
    assert (phase_of(frames(stack)), activity_of(frames(stack))) == (None, UNTOLD[stack])
