"""The bytes of single tokens: joined, they are what `decode` returns, for every kind of tokenizer.

Covered: byte-level, SentencePiece's Unigram and BPE with byte fallback, Metaspace, WordPiece, ids without a token.
"""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agent_r1_trl.features.inspector.token_bytes import TokenBytes
from agent_r1_trl.testing import make_tokenizer

TEXTS = [
    "Hello world",
    " two  blanks",
    "Höhe 🙂 高さ",
    "tab\tand\nline",
    "نیم‌فاصله",
    "a",
    "<|end|> after it",
    "👩‍👩‍👧 family",
]


def sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2's: `▁` for a blank and one before the text, bytes for what is unknown, the first blank stripped."""
    corpus = ["Hello world", "two blanks and a line", "after it there is more", "tab and family"] * 4
    trained = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
    options = {"unk_token": "<unk>"} if kind == "unigram" else {}
    trained.train_from_iterator(
        corpus, trainer(vocab_size=360, special_tokens=special, show_progress=False, **options)
    )
    state = json.loads(trained.to_str())["model"]
    if kind == "unigram":
        model = models.Unigram([tuple(pair) for pair in state["vocab"]], unk_id=0, byte_fallback=True)
    else:
        merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in state["merges"]]
        model = models.BPE(state["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "a", "b", "c", "▁a", "▁b", "ab"])], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "hello", "world", "##ly", "a", ","]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def joined(of_id: TokenBytes, ids: list[int]) -> str:
    data = b"".join(map(of_id, ids))
    return (data.removeprefix(b" ") if of_id.strips_start else data).decode("utf-8", "replace")


def test_byte_level_tokens_are_their_bytes_also_where_they_cut_a_character():
    tokenizer = make_tokenizer("qwen2_5")
    of_id = TokenBytes(tokenizer)
    cut = 0
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert joined(of_id, ids) == tokenizer.decode(ids, skip_special_tokens=False)
        cut += sum("\ufffd" in of_id(token_id).decode("utf-8", "replace") for token_id in ids)
    assert cut > 10  # single bytes of characters
    assert of_id.is_special(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert not of_id.is_special(tokenizer("Hello")["input_ids"][0])


def test_the_backend_alone_gives_the_same_as_the_tokenizer_of_transformers():
    tokenizer = make_tokenizer("qwen2_5")
    whole, backend = TokenBytes(tokenizer), TokenBytes(tokenizer.backend_tokenizer)
    ids = range(len(tokenizer))
    assert [whole(i) for i in ids] == [backend(i) for i in ids]
    assert [whole.is_special(i) for i in ids] == [backend.is_special(i) for i in ids]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_with_byte_fallback_give_what_decode_gives(kind, text):
    tokenizer = sentencepiece(kind)
    of_id, ids = TokenBytes(tokenizer), tokenizer.encode(text).ids
    assert of_id.strips_start
    assert joined(of_id, ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert any(of_id(token_id).startswith(b" ") for token_id in ids)


def test_bytes_are_bytes_and_the_unknown_is_no_byte():
    tokenizer = sentencepiece("unigram")
    of_id = TokenBytes(tokenizer)
    assert of_id(tokenizer.token_to_id("<0xE4>")) == b"\xe4" and of_id(tokenizer.token_to_id("<unk>")) == b"<unk>"


def test_metaspace_drops_the_first_blank_only():
    tokenizer = metaspace()
    of_id, ids = TokenBytes(tokenizer), tokenizer.encode("a b ab").ids
    assert joined(of_id, ids) == tokenizer.decode(ids) == "a b ab"


def test_another_kind_is_asked_token_by_token_and_keeps_its_blanks():
    tokenizer = wordpiece()
    of_id, ids = TokenBytes(tokenizer), tokenizer.encode("hello worldly a").ids
    assert [of_id(token_id) for token_id in ids] == [b" hello", b" world", b"ly", b" a"]


def test_an_id_without_a_token_is_its_number():
    assert TokenBytes(make_tokenizer("qwen2_5"))(9_999_999) == b"[9999999]"
    assert TokenBytes(None)(7) == b"[7]" and TokenBytes(None).is_special(7)
