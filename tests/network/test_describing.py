"""Layers are found where people have them, and `describe` says why each was taken or left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, OrthReg
from selfless.network.roles import adapters, hidden_layers, output_layer
from tests import text_nets
from tests.small_nets import Net, made, mlp, rand

pytestmark = pytest.mark.filterwarnings("ignore:.*hidden layers are left out")  # tested with the other notices of a keeper


def reasons(description: object) -> dict[str, str]:
    return {row.name: f"{row.status}: {row.reason}" for row in description}  # type: ignore[attr-defined]


def forward_and_penalise(model: nn.Module, x: Tensor, layers: str = "auto") -> tuple[Tensor, selfless.Keeper]:
    keeper = selfless.attach(model, MAS(1.0), SLNID(1e-2, absolute=True), layers=layers)
    model.train()
    model(x)
    return keeper.penalty(), keeper


def test_every_layer_has_a_row_with_its_reason() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc, self.plain, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.plain(F.relu(self.fc(F.relu(self.conv(x)).mean((2, 3))))))

    model, x = made(Image), rand(2, 3, 5, 5)
    before = reasons(selfless.describe(model))
    assert before["fc"] == "open: its activation is found in the first forward pass"
    found = selfless.describe(model, batch=x)
    assert found.taken == ("fc",)
    assert reasons(found) == {
        "conv": "left: a convolution: layers='all' takes it",
        "fc": "taken: ",
        "plain": "left: no activation function of torch follows it",
        "head": "left: the head, because it was registered last: name other heads with heads=",
    }
    assert selfless.describe(model, "all", batch=x).taken == ("conv", "fc")
    assert reasons(selfless.describe(model, heads=["plain"], batch=x))["plain"] == "left: a head"
    assert reasons(selfless.describe(model, ["fc"], batch=x))["conv"] == "left: not named in layers="
    _, keeper = forward_and_penalise(model, x)
    assert keeper.describe() == found
    lines = str(keeper.describe()).splitlines()
    assert lines[2].split() == ["fc", "Linear", "4", "→", "6", "relu", "taken"]
    assert lines[-1] == "1 of 4 layers taken"
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        selfless.describe("model")  # type: ignore[arg-type]


def test_layers_named_by_their_activation() -> None:
    model = made(mlp)
    (first, *_, last) = selfless.describe(model, ["1"])
    assert (first.status, first.reason, first.activation) == ("taken", "as '1'", "ReLU '1'")
    assert last.reason == "not named in layers="


@pytest.mark.parametrize("peft_names", [True, False])
def test_lora_is_one_layer_with_the_activation_after_it(peft_names: bool) -> None:
    """The activation follows the sum of the frozen layer and the product: the thin matrices and a frozen head are no layers."""

    class Thin(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.frozen = layer.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, layer.in_features)), nn.Parameter(torch.randn(layer.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x) + x @ self.a.T @ self.b.T

    def build() -> nn.Module:
        model = text_nets.with_lora()
        if not peft_names:
            model.block.up = Thin(model.block.up.base_layer)
        return model

    model = made(build)
    inner = "block.up.base_layer" if peft_names else "block.up.frozen"
    penalty, keeper = forward_and_penalise(model, text_nets.tokens())
    assert keeper.describe().taken == (inner,)
    seen: list[Tensor] = []
    handle = model.block.act.register_forward_hook(lambda _m, _i, h: seen.append(h.flatten(0, 1)))
    model(text_nets.tokens())
    handle.remove()
    assert_close(penalty, 1e-2 * selfless.functional.slnid(seen[0].abs(), torch.zeros(16), 16 / 6))
    keeper.consolidate([text_nets.tokens()])
    assert set(keeper.alpha) == {inner}
    assert set(keeper.state["omega"]) == {n for n, p in model.named_parameters() if p.requires_grad}
    why = reasons(keeper.describe())
    assert why["head.original_module"] == "left: a frozen copy of a layer that is trained; it does not run"
    assert why["head.modules_to_save.default"].startswith("left: the head")


def test_an_adapter_is_a_head_as_a_whole_and_a_frozen_first_layer_is_none() -> None:
    model = made(mlp)
    model[4] = text_nets.LoRA(model[4])
    model[4].spare = nn.ModuleDict()  # PEFT has such; it is no place for heads to come
    assert output_layer(model) == "4"
    assert list(hidden_layers(model)) == ["0", "2"]
    frozen = made(Net)
    frozen.fc1.requires_grad_(False)
    assert adapters(frozen) == {}
    assert adapters(made(text_nets.with_lora)) == {"block.up.base_layer": "block.up", "block.down.base_layer": "block.down"}


def test_conv1d_of_gpt_2_is_a_linear_layer() -> None:
    model = made(lambda: text_nets.Text(lambda: text_nets.Block(linear=lambda i, o: text_nets.Conv1D(o, i))))
    penalty, keeper = forward_and_penalise(model, text_nets.tokens())
    assert penalty > 0
    assert keeper.describe().taken == ("block.up",)
    keeper.consolidate([text_nets.tokens()])
    assert keeper.alpha["block.up"].shape == (16,)
    keeper.load_state_dict(keeper.state_dict())
    keeper.detach()
    with selfless.attach(model, None, OrthReg(1.0), layers=["block.up"]) as weights:
        model(text_nets.tokens())
        assert_close(weights.penalty(), selfless.functional.orth_reg(model.block.up.weight.T))  # rows are neurons


@pytest.mark.slow
def test_torchs_encoder_under_compile() -> None:
    model, x = made(lambda: text_nets.Text(text_nets.stock)), text_nets.tokens()
    want, eager = forward_and_penalise(model, x)
    assert eager.describe().taken == ("block.layers.0.linear1", "block.layers.1.linear1")
    eager.detach()
    compiled = torch.compile(model, backend="eager")
    got, keeper = forward_and_penalise(compiled, x)
    assert_close(got, want)
    assert keeper.describe().taken == eager.describe().taken
    assert "before torch.compile" in reasons(keeper.describe())["block.layers.0.linear2"]
    assert "never calls it" in reasons(keeper.describe())["block.layers.0.self_attn.out_proj"]


def test_the_error_of_a_compiled_model_names_a_remedy_that_works() -> None:
    model, x = made(Net), rand(4, 6)
    with pytest.raises(ValueError, match="attach to the plain model and run it on one batch before"):
        selfless.attach(torch.compile(model, backend="eager"), None, SLNID(1e-2))
    want, keeper = forward_and_penalise(model, x)
    torch.compile(model, backend="eager")(x)
    assert_close(keeper.penalty(), want)


def test_peft() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the models of Hugging Face: pip install transformers")
    peft = pytest.importorskip("peft", reason="needs LoRA of Hugging Face: pip install peft")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 13}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    model = peft.get_peft_model(bert, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["intermediate.dense"]))
    _, keeper = forward_and_penalise(model, text_nets.tokens())
    assert [name.partition("bert.")[2] for name in keeper.describe().taken] == [
        "encoder.layer.0.intermediate.dense.base_layer",
        "pooler.dense",
    ]
    assert reasons(keeper.describe())["base_model.model.classifier.modules_to_save.default"].startswith("left: the head")
