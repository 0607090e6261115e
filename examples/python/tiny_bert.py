"""Write a random BERT of 90 thousand parameters, to rehearse an embedding model on two CPU cores.

    python examples/python/tiny_bert.py FOLDER ROWS.jsonl

Its tokenizer knows the words of the rows.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def read_texts(path):
    """Yield all texts of a file of rows."""
    with Path(path).open() as file:
        for line in file:
            for value in json.loads(line).values():
                if isinstance(value, list):
                    yield from value
                else:
                    yield value


def make_tokenizer(texts):
    """Return a tokenizer of words, which puts [CLS] and [SEP] around a text or two."""
    core = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False)
    )
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def main(folder, rows):
    torch.manual_seed(0)
    tokenizer = make_tokenizer(read_texts(rows))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
