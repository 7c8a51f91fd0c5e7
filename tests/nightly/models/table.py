"""The models to judge; a library is imported when one of its models is built."""

from tests.nightly.models.case import Entry
from tests.nightly.models.zoo import (
    decoders,
    encoders,
    hybrids,
    images,
    later,
    lucid,
    media,
    pictures,
    recent,
    scans,
    science,
    series,
    speech,
    tables,
    texts,
    timms,
    torchvisions,
    voices,
)

MODELS: list[Entry] = [
    *decoders.MODELS,
    *encoders.MODELS,
    *hybrids.MODELS,
    *recent.MODELS,
    *later.MODELS,
    *images.MODELS,
    *pictures.MODELS,
    *speech.MODELS,
    *series.MODELS,
    *media.MODELS,
    *lucid.MODELS,
    *timms.MODELS,
    *torchvisions.MODELS,
    *texts.MODELS,
    *tables.MODELS,
    *voices.MODELS,
    *science.MODELS,
    *scans.MODELS,
]
