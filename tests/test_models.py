"""The networks: sizes computed by hand, seeds, fleets under vmap, custom networks."""

import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

from selfless.models import Network, build, hidden_layers, names

MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def images(shape: tuple[int, int, int], n: int = 2) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


CONVS = (32 * 3 + 32 * 32 + 64 * 32 + 64 * 64) * 9 + 32 + 32 + 64 + 64
VGG = (64 * 3 + 128 * 64 + 256 * 128 + 256 * 256 + 512 * 256 + 512 * 512) * 9 + 64 + 128 + 256 + 256 + 512 + 512
SIZES = [  # name, outputs, input, options, parameters
    ("mlp-128", 10, MNIST, {}, 785 * 128 + 129 * 128 + 129 * 10),
    ("mlp-64", 10, MNIST, {"layers": 3}, 785 * 64 + 2 * 65 * 64 + 65 * 10),
    ("mlp-16", 4, (3, 5, 7), {"layers": 1}, 106 * 16 + 17 * 4),
    ("mlp-128-lwta", 10, MNIST, {}, 118_282),
    ("mlp-128-maxout", 10, MNIST, {}, 785 * 138 + 70 * 138 + 70 * 10),
    ("mlp-64-maxout", 10, MNIST, {}, 54_394),
    ("mlp-32-maxout", 10, MNIST, {"window": 32, "layers": 1}, 785 * 32 + 2 * 10),
    ("mlp-128-maxout", 10, MNIST, {"released": True}, 785 * 128 + 65 * 64 + 33 * 10),
    ("cnn-256", 100, CIFAR, {}, CONVS + 2305 * 256 + 257 * 100),
    ("cnn-128", 100, CIFAR, {"padding": "same", "dropout": 0.5}, CONVS + 4097 * 128 + 129 * 100),
    ("alexnet-cifar", 100, (3, 32, 32), {}, 207872 + 9088 + 2048 * (1024 + 2048 + 100)),
    ("alexnet-cifar", 100, (3, 32, 32), {"batch_norm": False, "fc_units": 8}, 207872 + 448 + 1025 * 8 + 9 * 8 + 9 * 100),
    ("vgg-slim", 200, TINY, {}, VGG + 8193 * 500 + 501 * 500 + 501 * 200),
    ("vgg-slim", 200, (3, 56, 56), {"fc_units": 50}, VGG + 4609 * 50 + 51 * 50 + 51 * 200),
    ("vgg-slim", 20, (3, 56, 56), {"pools": 3, "fc_units": 50}, VGG + 25089 * 50 + 51 * 50 + 51 * 20),
    ("vgg-slim", 20, TINY, {"batch_norm": True}, VGG + 2 * 1728 + 8193 * 500 + 501 * 500 + 501 * 20),
]


@pytest.mark.parametrize(("name", "outputs", "shape", "options", "parameters"), SIZES, ids=lambda v: str(v))
def test_sizes_by_hand_and_layer_names(name, outputs, shape, options, parameters):
    model = build(name, outputs=outputs, input_shape=shape, seed=0, **options)
    assert count(model) == parameters
    assert model(images(shape)).shape == (2, outputs)
    assert isinstance(model.head, nn.Linear)
    modules = dict(model.named_modules())
    assert hidden_layers(model) == model.hidden
    for layer in model.hidden + model.hidden_conv:
        before = {"hidden": "fc", "hidden_conv": "conv"}["hidden" if layer in model.hidden else "hidden_conv"]
        assert layer.replace("act", before) in modules
    assert not any(getattr(module, "inplace", False) for module in modules.values())


@pytest.mark.slow
def test_hidden_layers_by_name():
    assert build("mlp-8", outputs=2, input_shape=MNIST).hidden == ("act1", "act2")
    cnn = build("cnn-8", outputs=2, input_shape=CIFAR)
    assert (cnn.hidden, cnn.hidden_conv) == (("act5",), ("act1", "act2", "act3", "act4"))
    vgg = build("vgg-slim", outputs=2, input_shape=(3, 16, 16))
    assert (vgg.hidden, len(vgg.hidden_conv)) == (("act7", "act8"), 6)
    assert [m.kernel_size for m in vgg if isinstance(m, nn.MaxPool2d)] == [2] * 4
    assert isinstance(vgg[:3], Network)
    started = build("vgg-slim", outputs=20, input_shape=(3, 56, 56), seed=0)
    x = torch.randn(8, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    assert 0.2 < started[:-1](x).std().item() < 5  # eight layers keep the scale of their input …
    assert torch.equal(started(x), torch.zeros(8, 20))  # … and the head starts at zero


@pytest.mark.parametrize("n", [1, 10, 64, 100, 128, 500])
def test_maxout_is_the_nearest_in_parameters(n):
    def parameters(**sizes):
        k, w = sizes["k"], sizes["w"]
        return count(nn.Sequential(nn.Linear(50, w * k), nn.Linear(k, w * k), nn.Linear(k, 10)))

    model = build(f"mlp-{n}-maxout", outputs=10, input_shape=(1, 5, 10))
    k = model.head.in_features
    gaps = {j: abs(parameters(k=j, w=2) - parameters(k=n, w=1)) for j in (k - 1, k, k + 1) if j}
    assert count(model) == parameters(k=k, w=2)
    assert gaps[k] == min(gaps.values())


def test_lwta_sets_half_of_the_units_to_zero():
    model = build("mlp-12-lwta", outputs=2, input_shape=MNIST, seed=0)
    seen = []
    model.act1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(images(MNIST, 5))
    assert (seen[0] != 0).sum(1).tolist() == [6] * 5
    relu = build("mlp-12", outputs=2, input_shape=MNIST, seed=0)
    assert_close(model.state_dict(), relu.state_dict())


# ---- randomness --------------------------------------------------------------------------------------------------------------


def test_a_seed_is_reproducible_and_keeps_the_global_random_state():
    state = torch.random.get_rng_state()
    one, same, other = (build("cnn-8", outputs=2, input_shape=CIFAR, seed=s) for s in (5, 5, 6))
    assert_close(torch.random.get_rng_state(), state, rtol=0, atol=0)
    assert_close(one.state_dict(), same.state_dict(), rtol=0, atol=0)
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_initialisation_is_the_default_of_pytorch():
    model = build("mlp-8", outputs=3, input_shape=(1, 2, 2), seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        plain = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
        torch.manual_seed(7)
        unseeded = build("mlp-8", outputs=3, input_shape=(1, 2, 2))
    for ours, theirs in zip((model.fc1, model.fc2, model.head), plain, strict=True):
        assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert_close(unseeded.state_dict(), model.state_dict(), rtol=0, atol=0)


# ---- fleets and compilation --------------------------------------------------------------------------------------------------

FLEETS = [
    ("mlp-8", MNIST, {}),
    ("mlp-8-maxout", MNIST, {}),
    ("mlp-8-lwta", MNIST, {}),
    ("cnn-8", (3, 16, 16), {}),
    ("vgg-slim", (3, 16, 16), {"fc_units": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "options"), FLEETS, ids=lambda v: str(v))
def test_a_fleet_of_three_equals_three_networks(name, shape, options):
    members = [build(name, outputs=4, input_shape=shape, seed=s, **options).double() for s in range(3)]
    parameters, buffers = stack_module_state(members)
    x = torch.stack([images(shape, 2).double() + s for s in range(3)])

    def call(p, b, x):
        return functional_call(members[0], (p, b), (x,))

    def loss(p, b, x):
        return call(p, b, x).square().sum()

    assert_close(vmap(call)(parameters, buffers, x), torch.stack([m(xi) for m, xi in zip(members, x, strict=True)]))
    gradients = vmap(grad(loss))(parameters, buffers, x)
    for s, member in enumerate(members):
        member(x[s]).square().sum().backward()
        for key, parameter in member.named_parameters():
            assert_close(gradients[key][s], parameter.grad, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "options"), FLEETS, ids=lambda v: str(v))
def test_compiles_without_a_graph_break(name, shape, options):
    model, x = build(name, outputs=4, input_shape=shape, seed=0, **options), images(shape)
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# ---- custom networks ---------------------------------------------------------------------------------------------------------

CUSTOM = """
import torch
from torch import nn

def build(outputs, input_shape, width=4):
    c, h, w = input_shape
    return nn.Sequential(nn.Conv2d(c, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(2 * h * w, width), nn.LayerNorm(width),
                         nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs), nn.Sigmoid())

def bare():
    return nn.Linear(3, 2)

def named(outputs):
    model = build(outputs, (1, 2, 2))
    model.hidden = ["7"]
    return model

def wrong_name():
    model = bare()
    model.hidden = ("fc9",)
    return model

def clash():
    model = nn.Module()
    model.hidden = nn.Linear(1, 1)
    return model

def functional():
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

def shared():
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(1, 1), act, nn.Linear(1, 1), act, nn.Linear(1, 1))

def any_options(**options):
    model = bare()
    model.options = sorted(options)
    return model

def positional(num_classes):
    return bare()

def text():
    return "network"

value = 3
"""


@pytest.fixture
def build_custom(tmp_path, monkeypatch):
    """Write a module with a unique name to the working directory; return a function that builds one of its networks."""
    name = f"custom_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CUSTOM)
    (tmp_path / f"{name}_broken.py").write_text("import selfless_has_no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(tmp_path)])  # importing adds the folder; this undoes it

    def call(factory, suffix="", **options):
        return build(f"{name}{suffix}:{factory}", outputs=6, input_shape=(1, 2, 2), **options)

    return call


def test_a_custom_network_and_its_hidden_layers(build_custom):
    model = build_custom("build", seed=1, width=5)
    assert (model.hidden, model.hidden_conv) == (("5", "7"), ("1",))
    assert model(torch.zeros(3, 1, 2, 2)).shape == (3, 6)
    assert_close(model.state_dict(), build_custom("build", seed=1, width=5).state_dict())
    assert build_custom("bare").hidden == ()
    assert build_custom("named").hidden == ("7",)
    assert build_custom("any_options", extra=1).options == ["extra", "input_shape", "outputs"]


@pytest.mark.parametrize(
    ("factory", "error", "match"),
    [
        ("bulid", ValueError, "has no 'bulid'; it has build"),
        ("value", TypeError, "must be a function"),
        ("text", TypeError, "not a torch.nn.Module"),
        ("wrong_name", ValueError, "'fc9' of hidden is not in the model"),
        ("clash", TypeError, "tuple of module names"),
        ("shared", ValueError, "are the same activation module"),
        ("positional", ValueError, "needs 'num_classes'"),
        ("", ValueError, "module:factory"),
    ],
)
def test_a_custom_network_is_refused(build_custom, factory, error, match):
    with pytest.raises(error, match=match):
        build_custom(factory)


def test_a_custom_module_that_is_missing_or_fails(build_custom):
    with pytest.raises(ValueError, match="there is no module"):
        build_custom("build", suffix="_absent")
    with pytest.raises(ValueError, match=r"_broken.py, line 1: ModuleNotFoundError: No module named 'selfless_has_no_such_module"):
        build_custom("build", suffix="_broken")
    with pytest.raises(ValueError, match=r"no option 'deep'; it has width"):
        build_custom("build", deep=3)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mpl-128", "did you mean mlp-128?"),
        ("mlp", "did you mean mlp-128?"),
        ("mlp-64-lwat", "did you mean mlp-64-lwta?"),
        ("vgg_slim", "did you mean vgg-slim?"),
        ("mlp-N", "did you mean mlp-128?"),
        ("xyzzy", "The networks are mlp-N"),
    ],
)
def test_unknown_names_get_a_suggestion_and_the_list(name, hint):
    with pytest.raises(ValueError, match="unknown network") as caught:
        build(name, outputs=2, input_shape=MNIST)
    assert hint in str(caught.value)
    assert all(known in str(caught.value) for known in names())


@pytest.mark.parametrize(
    ("name", "shape", "options", "match"),
    [
        ("mlp-8", MNIST, {"depth": 2}, "no option 'depth'; it has layers"),
        ("mlp-0", MNIST, {}, "at least one unit"),
        ("mlp-8", MNIST, {"layers": 0}, "at least one hidden layer"),
        ("mlp-7-lwta", MNIST, {}, "do not divide"),
        ("cnn-8", (3, 8, 8), {}, "too small"),
        ("cnn-8", CIFAR, {"padding": "valid"}, "padding must be"),
        ("cnn-8", CIFAR, {"dropout": 1.0}, "dropout must lie"),
        ("vgg-slim", (3, 8, 8), {}, "too small"),
        ("vgg-slim", TINY, {"pools": 5}, "not 5"),
        ("alexnet", CIFAR, {}, "at least 63×63"),
        ("alexnet", TINY, {"fc": "pretrained"}, "needs weights"),
        ("alexnet", TINY, {"fc": "new"}, "fc must be"),
        ("mlp-8", (28, 28), {}, r"input_shape \(C, H, W\)"),
    ],
)
def test_a_known_network_is_refused(name, shape, options, match):
    with pytest.raises(ValueError, match=match):
        build(name, outputs=2, input_shape=shape, **options)


def test_names_are_described():
    assert list(names())[:2] == ["mlp-N", "mlp-N-maxout"]
    assert all(about and "\n" not in about for about in names().values())


def test_a_custom_network_that_calls_activations_as_functions_has_no_hidden_layers(build_custom):
    assert build_custom("functional").hidden == ()
