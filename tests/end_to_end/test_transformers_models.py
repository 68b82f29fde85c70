"""Tiny random models of the transformers library train bit for bit as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
TEXT = (2, 12)


@pytest.fixture(autouse=True)
def _warnings_of_others() -> None:
    transformers.logging.set_verbosity_error()


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, TEXT)


def padding() -> Tensor:
    mask = torch.ones(TEXT, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


def text() -> dict[str, Tensor]:
    found = tokens()
    return {"input_ids": found, "attention_mask": padding(), "labels": found}


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        attn_implementation=attention,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    # Without it the library warns by its logger in the middle of the forward: a graph break.
    model.loss_type = "ForCausalLM"
    return model


# The first forward of a classifier without a `problem_type` sets one, which is a second graph.
def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
        problem_type="single_label_classification",
    )
    return transformers.BertForSequenceClassification(config).train()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=3,
        problem_type="single_label_classification",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config).train()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        attention_dropout=0.1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).train()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt2": (lambda: gpt2("sdpa"), text),
    "gpt2 eager attention": (lambda: gpt2("eager"), text),
    "bert": (
        bert,
        lambda: {
            "input_ids": tokens(),
            "attention_mask": padding(),
            "labels": torch.tensor([0, 2]),
        },
    ),
    "vit": (
        vit,
        lambda: {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])},
    ),
    "llama": (llama, text),
    "t5": (t5, text),
}


@pytest.mark.parametrize("name", CASES)
def test_a_transformer_trains_as_eager(name: str, assert_bit_equal: Callable[..., Any]) -> None:
    make_model, make_input = CASES[name]
    assert_bit_equal(make_model, make_input, loss=lambda output: output.loss)


def test_the_output_keeps_its_class(optimized: Callable[..., Any]) -> None:
    module = optimized(gpt2("sdpa"), text())
    output = module(**text())
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert isinstance(output, transformers.utils.ModelOutput)
    assert output.loss.requires_grad and output["logits"].shape == (*TEXT, VOCABULARY)


def test_a_model_can_be_trained_without_labels(assert_bit_equal: Callable[..., Any]) -> None:
    assert_bit_equal(
        lambda: gpt2("sdpa"),
        lambda: (tokens(),),
        loss=lambda output: output.logits.logsumexp(-1).mean(),
        plans=("offload_all",),
    )
