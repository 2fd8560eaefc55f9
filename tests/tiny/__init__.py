"""Small random models and tokenizers made on the spot, for tests."""

import torch


def _transformers():
    import transformers

    return transformers


def gpt2(vocab=64, dtype=torch.float32, seed=0, **kw):
    t = _transformers()
    torch.manual_seed(seed)
    options = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    options["initializer_range"] = 0.3
    return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=vocab, **(options | kw))).to(dtype).eval()


def _llama_style(model, config, vocab, dtype, seed, **kw):
    t = _transformers()
    torch.manual_seed(seed)
    options = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
    options |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return getattr(t, model)(getattr(t, config)(**(options | kw))).to(dtype).eval()


def llama(vocab=64, dtype=torch.float32, seed=0, **kw):
    return _llama_style("LlamaForCausalLM", "LlamaConfig", vocab, dtype, seed, **kw)


def qwen3(vocab=64, dtype=torch.float32, seed=0, **kw):
    shape = {"num_key_value_heads": 1, "head_dim": 16}
    return _llama_style("Qwen3ForCausalLM", "Qwen3Config", vocab, dtype, seed, **(shape | kw))


def gemma2(vocab=64, dtype=torch.float32, seed=0, **kw):
    shape = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16}
    shape["final_logit_softcapping"] = 3.0
    return _llama_style("Gemma2ForCausalLM", "Gemma2Config", vocab, dtype, seed, **(shape | kw))


def cohere(vocab=64, dtype=torch.float32, seed=0, **kw):
    return _llama_style("CohereForCausalLM", "CohereConfig", vocab, dtype, seed, **({"logit_scale": 0.25} | kw))


def granite(vocab=64, dtype=torch.float32, seed=0, **kw):
    return _llama_style("GraniteForCausalLM", "GraniteConfig", vocab, dtype, seed, **({"logits_scaling": 4.0} | kw))


def mistral(vocab=64, dtype=torch.float32, seed=0, **kw):
    shape = {"num_key_value_heads": 1, "sliding_window": 4}
    return _llama_style("MistralForCausalLM", "MistralConfig", vocab, dtype, seed, **(shape | kw))


def phi3(vocab=64, dtype=torch.float32, seed=0, **kw):
    return _llama_style("Phi3ForCausalLM", "Phi3Config", vocab, dtype, seed, **kw)


def opt(vocab=64, dtype=torch.float32, seed=0):
    """Dropout that the layers call themselves, by their own mode."""
    t = _transformers()
    torch.manual_seed(seed)
    config = t.OPTConfig(vocab_size=vocab, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
                         max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.5, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0, init_std=0.3)  # fmt: skip
    return t.OPTForCausalLM(config).to(dtype).eval()


def bloom(vocab=64, dtype=torch.float32, seed=0):
    """No position ids in its forward: positions come from the attention mask."""
    t = _transformers()
    torch.manual_seed(seed)
    config = t.BloomConfig(vocab_size=vocab, hidden_size=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
                           initializer_range=0.3)  # fmt: skip
    return t.BloomForCausalLM(config).to(dtype).eval()


def falcon(vocab=64, dtype=torch.float32, seed=0):
    """Its attention asks for implementations by name and attends by itself under any other."""
    t = _transformers()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = t.FalconConfig(vocab_size=vocab, **sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    return t.FalconForCausalLM(config).to(dtype).eval()


def byte_tokenizer(vocab=300, template=None):
    """A byte-level BPE tokenizer: ids 0 <unk>, 1 <s>, 2 </s>, then bytes and merges; every text decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(["the answer is 12 + 30 = 42, so the answer is 42."] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def gemma(vocab=64, dtype=torch.float32, seed=0, **kw):
    shape = {"num_key_value_heads": 1, "head_dim": 16}
    return _llama_style("GemmaForCausalLM", "GemmaConfig", vocab, dtype, seed, **(shape | kw))
