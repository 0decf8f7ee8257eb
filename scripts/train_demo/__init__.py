"""The recipe of the bundled demo checkpoint: data, tokenizer, model, training, scoring."""
