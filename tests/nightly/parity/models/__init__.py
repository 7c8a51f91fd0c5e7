"""Models of the random cases, one file per family."""

from tests.nightly.parity.models import decoder, functions, others, plain, published
from tests.nightly.parity.models.kind import Kind

KINDS: dict[str, Kind] = {
    **decoder.KINDS,
    **plain.KINDS,
    **others.KINDS,
    **functions.KINDS,
    **published.KINDS,
}
