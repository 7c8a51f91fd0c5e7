from tools.models.case import Entry

MODELS: list[Entry] = []
