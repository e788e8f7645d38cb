"""Typed access to the keys of a `config.json`, with the defaults of its model type."""

from msgspec import Struct

from planner.errors import InputError, shortened

# Largest values of a config.json. Of the models in data/models.jsonl Llama-3.1-405B has the most layers: 126. Each is
# looked at, so that their number bounds the time: 15 s for 100,000. The largest other size there is 10,485,760, the
# positions of Llama-4-Scout; products of a few sizes up to 2**40 are floats still, which end at 2**1024.
MAX_LAYERS = 1_000
MAX_SIZE = 2**40
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "depth")


class Fields(Struct, frozen=True, kw_only=True):
    """The keys of one model's config. `values` contains the defaults of `defaults.py` for absent keys."""

    id: str
    model_type: str
    values: dict[str, object]

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str) -> int:
        """A size, such as `hidden_size`.

        Raises:
            InputError: the key is absent, or its value is not a whole number of 0 or more.
        """
        value = self.values.get(key)
        if value is None:
            raise InputError(
                f"The config.json of {self.id} has no {key!r}, which its model type {self.model_type!r} needs."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"The config.json of {self.id} has {key!r}: {_shown(value)}, which is not a whole number.")
        most = MAX_LAYERS if key in LAYER_KEYS else MAX_SIZE
        if value > most:
            raise InputError(f"The config.json of {self.id} has {key!r}: {_shown(value)}, more than {most:,}.")
        return value

    def positive(self, key: str) -> int:
        """A size that cannot be zero.

        Raises:
            InputError: the key is absent, or its value is not a positive whole number.
        """
        value = self.integer(key)
        if value == 0:
            raise InputError(f"The config.json of {self.id} has {key!r}: 0, which must be positive.")
        return value

    def number(self, key: str) -> float:
        """A rate, such as `attention_dropout`; 0 if the key is absent.

        Raises:
            InputError: the value is not a number.
        """
        value = self.values.get(key, 0.0) or 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"The config.json of {self.id} has {key!r}: {_shown(value)}, which is not a number.")
        if not abs(value) <= MAX_SIZE:
            raise InputError(f"The config.json of {self.id} has {key!r}: {_shown(value)}, more than {MAX_SIZE:,}.")
        return float(value)

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key))

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise InputError(f"The config.json of {self.id} has {key!r}: {_shown(value)}, which is not a text.")
        return value

    def sequence(self, key: str) -> list[object]:
        """A list; empty if the key is absent."""
        value = self.values.get(key)
        return list(value) if isinstance(value, list) else []


def _shown(value: object) -> str:
    """Return a value as Python writes it, shortened."""
    return shortened(repr(value)) if not isinstance(value, int) else shortened(value)
