"""The sizes of a head that a recipe may name. Reading them imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

# A recipe has transformers' names: `num_heads` is how many Medusa heads there are.
_NAMES = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}


class HeadSizes(BaseModel):
    """A part of the `head` section. What is left out is the target's own; a smaller `hidden_size`
    scales the rest with it and gives the head an embedding table of its own.
    """

    hidden_size: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the recipe names, as `Eagle3Head.for_target` calls them."""
        given = {name: getattr(self, name) for name in HeadSizes.model_fields}
        return {_NAMES.get(name, name): size for name, size in given.items() if size is not None}

    @model_validator(mode="after")
    def a_given_head_keeps_its_sizes(self) -> HeadSizes:
        given = [name for name in HeadSizes.model_fields if getattr(self, name) is not None]
        if given and getattr(self, "init_from", None) is not None:
            raise ValueError(
                f"init_from takes the sizes of the head it names; leave out {', '.join(given)}"
            )
        return self
