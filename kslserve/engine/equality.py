"""How far an engine keeps the determinism contract, property by property."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Closeness:
    """Logits of one position that were computed in two ways, on a trained model. distance: relative
    L2, at most. divergence: mean KL in nats, at most. Both 0: equal bits."""

    distance: float = 0.0
    divergence: float = 0.0

    @property
    def bit(self) -> bool:
        return self.distance == 0

    def __str__(self) -> str:
        if self.bit:
            return "bit"
        return f"tolerance: logits within {self.distance:g}, KL {self.divergence:g}"


BIT = Closeness()


@dataclass(frozen=True, slots=True)
class Equality:
    """What a position's logits do not depend on: how the rows of its prompt were cut (chunked);
    what else its waves held (batch); whether the state before it was adopted, from a prompt's
    checkpoint or a generation's; drafts (speculation).

    columns, row: what is no equality of bits is one among waves of at most so many columns whose
    rows have at most so many; 0: any."""

    chunked: Closeness = BIT
    batch: Closeness = BIT
    adopted_prompt: Closeness = BIT
    adopted_generation: Closeness = BIT
    speculation: Closeness = BIT
    columns: int = 0
    row: int = 0

    def properties(self) -> dict[str, Closeness]:
        """By name, in the order of the C ABI."""
        return {name: getattr(self, name) for name in PROPERTIES}

    def texts(self) -> dict[str, str]:
        """For reports: `bit`, or `tolerance` with its figures; where it is `bit` all the same."""
        found = {name: str(closeness) for name, closeness in self.properties().items()}
        return found | ({"bit_within": scope} if (scope := self.scope()) else {})

    def scope(self) -> str:
        """Where all properties are equalities of bits; empty: everywhere."""
        parts = [f"waves of at most {self.columns} columns"] * bool(self.columns)
        parts += [f"rows of at most {self.row}"] * bool(self.row)
        return ", ".join(parts)


EQUAL = Equality()
PROPERTIES = tuple(field.name for field in fields(Equality) if field.type == "Closeness")
