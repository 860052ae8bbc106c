"""The paper's language models, from text to tables."""
