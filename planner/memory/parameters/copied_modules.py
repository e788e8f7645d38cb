"""Whole modules that PEFT copies and trains beside the adapters: `modules_to_save` of a LoraConfig."""

from planner.errors import InputError
from planner.memory.parameters.tensors import EqualTensors, head_tensors, model_tensors, score_tensors
from planner.methods import Head
from planner.models.shape import ModelShape

HEAD_NAME, SCORE_NAME = "lm_head", "score"


def copies_head(modules: tuple[str, ...], head: Head) -> bool:
    """Return whether the language-model head is copied, and the copy trained."""
    return head == "lm_head" and HEAD_NAME in modules


def copied_tensors(model: ModelShape, head: Head, modules: tuple[str, ...]) -> tuple[EqualTensors, ...]:
    """The tensors of PEFT's copies: those of `modules`, and always the score head of a reward model.

        embedding   [V, H];  head   [V, H], and its bias

    The original stays, frozen, and a pass with disabled adapters uses it. PEFT copies a tied weight, too
    (`ensure_weight_tying` is off, and TRL's ModelConfig cannot set it): embedding and head are no longer tied then.

    Source: peft 0.21.2, utils/other.py, `ModulesToSaveWrapper.update` (`copy.deepcopy`) and `_set_trainable`;
    peft_model.py, `PeftModelForSequenceClassification.__init__` (score).

    Example: Qwen2.5-7B, `lm_head` and `embed_tokens`: 2 x 152,064 x 3,584 parameters beside 40,370,176 of LoRA r 16.

    Raises:
        InputError: a module is none of these. PEFT itself ignores names that match nothing.
    """
    embedding = model.architecture.embedding_name
    known = (embedding, SCORE_NAME if head == "score" else HEAD_NAME)
    unknown = [name for name in modules if name not in known]
    if unknown:
        raise InputError(
            f"lora_modules_to_save {', '.join(unknown)} is not counted. Of {model.id} it can be {' and '.join(known)}."
        )
    found = [kind for kind in model_tensors(model, head) if kind.part == "embedding" and embedding in modules]
    if copies_head(modules, head):
        found += head_tensors(model, untied=True)
    if head == "score":
        found += score_tensors(model)
    return tuple(found)
