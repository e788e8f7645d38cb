"""Keys of a TRL config file that the newest release does not have: misspelt ones, and those of older releases."""

from collections.abc import Mapping

from msgspec import Struct

from planner.errors import UnknownName, edits
from planner.jobs.settings import setting_names
from planner.methods import METHODS, release
from planner.settings.unread import UNMODELLED, WITHOUT_EFFECT

LETTERS_PER_EDIT = 8  # of a key without its underscores: no name of the libraries' arguments is so close to another
# Launch arguments beside those of `setting_names`: accelerate 1.15, commands/launch.py.
LAUNCHED = ("parallelism_config_tp_size",)


class OlderKey(Struct, frozen=True, kw_only=True):
    """An argument that memory depends on. `last`: the last release that has it; `setting`: the one that says it now.

    `value`: the setting's value; empty: the key's own.
    """

    last: str
    setting: str
    value: str = ""

    @property
    def replacement(self) -> str:
        """The setting to use instead. TRL 1.0 and later cut no prompts: their length is that of the data."""
        if self.setting == "prompt_length":
            return "--prompt-length and no key"
        return f"{self.setting}: {self.value}" if self.value else self.setting


# Source: trl 0.14 to 0.29, trainer/grpo_config.py, sft_config.py, dpo_config.py, kto_config.py. Until 0.16 the engine
# was on a GPU of its own (grpo_trainer.py, `vllm_device`), in 0.17 on a server's.
OLDER_KEYS: dict[str, OlderKey] = {
    "max_prompt_length": OlderKey(last="0.27", setting="prompt_length"),
    "max_seq_length": OlderKey(last="0.19", setting="max_length"),
    "use_liger": OlderKey(last="0.15", setting="use_liger_kernel"),
    "use_liger_loss": OlderKey(last="0.27", setting="use_liger_kernel"),
    "vllm_device": OlderKey(last="0.17", setting="vllm_mode", value="server"),
    "vllm_max_model_len": OlderKey(last="0.17", setting="vllm_max_model_length"),
}
# The engine's place where `vllm_mode` is not set, in the releases before 1.0, which have it since 0.18.
# Source: trl 0.18 to 0.29, trainer/grpo_config.py, `vllm_mode`; trl 1.0: "colocate".
OLDER_ENGINE = {"vllm_mode": "server"}


def refuse_misspelt(keys: Mapping[str, object]) -> None:
    """Refuse a key that almost equals an argument: `trl` stops at a key that neither it nor accelerate knows.

    Source: trl 1.16, cli/commands/training.py, `TrainingCommand.run`; accelerate 1.15, commands/launch.py.

    Raises:
        UnknownName: there is such a key. The message has the argument.
    """
    known = {_plain(name): name for name in (*LAUNCHED, *UNMODELLED, *WITHOUT_EFFECT, *OLDER_KEYS, *setting_names())}
    for key in keys.keys() - set(known.values()):
        near = [known[name] for name in known if _is_misspelt(_plain(key), name)]
        if near:
            raise UnknownName("key", key, near, hint="TRL stops at a key that it does not know.")


def _is_misspelt(key: str, name: str) -> bool:
    """True if few letters turn a plain key into a plain name; letters that only one of them has need an edit each."""
    most = len(key) // LETTERS_PER_EDIT
    return len(set(key) ^ set(name)) <= 2 * most and edits(key, name) <= most


def _plain(name: str) -> str:
    """A name without what is easily missed: underscores, hyphens and capital letters."""
    return name.replace("_", "").replace("-", "").lower()


# The names that a method's config has for settings that others name otherwise.
NAMED_BY = {str(name): frozenset(row.argument_names.values()) for name, row in METHODS.items()}


def older_keys(keys: Mapping[str, object], method: str) -> dict[str, str]:
    """Return the last release of each key that only older releases have; unset ones are left out.

    `method`: empty if unknown. SDFT's config still has `max_prompt_length`.
    """
    given = {key: row.last for key, row in OLDER_KEYS.items() if keys.get(key) not in (None, False)}
    return {key: last for key, last in given.items() if key not in NAMED_BY.get(method, ())}


def with_newer_keys(keys: Mapping[str, object], found: Mapping[str, str]) -> dict[str, object]:
    """Return the keys with those of older releases under the names of settings, and the defaults of those releases.

    Keys that are names of a setting themselves stay, so that two names with different values are found. `found`: see
    `older_keys`.
    """
    renamed = OLDER_KEYS.keys() - setting_names()
    newer = {key: value for key, value in keys.items() if key not in renamed}
    for key in found.keys() & renamed:
        newer.setdefault(OLDER_KEYS[key].setting, OLDER_KEYS[key].value or keys[key])
    return {**OLDER_ENGINE, **newer} if found and keys.get("use_vllm") else newer


def newest_release_of(found: Mapping[str, str]) -> str:
    """Return the newest release that has all of these keys, by key -> its last release; empty without keys."""
    return min(found.values(), key=release, default="")
