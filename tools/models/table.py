"""The models that are judged; their libraries are imported when one of them is built."""

from tools.models.case import Entry
from tools.models.zoo import decoders, encoders, hybrids, images, lucid, media, recent, timms, torchvisions

MODELS: list[Entry] = [
    *decoders.MODELS,
    *encoders.MODELS,
    *hybrids.MODELS,
    *recent.MODELS,
    *images.MODELS,
    *media.MODELS,
    *lucid.MODELS,
    *timms.MODELS,
    *torchvisions.MODELS,
]
