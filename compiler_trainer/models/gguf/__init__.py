"""GGUF, the file format of llama.cpp: a folder of transformers as one file with weights, options and tokenizer."""
