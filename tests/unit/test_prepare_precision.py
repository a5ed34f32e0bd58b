"""accelerate, prepare_optimizer and backward. Loss scaling is real: torch has a scaler for the CPU, too."""

import copy

import pytest
import torch
import torch._dynamo  # torch imports it at some first use and sets a variable then: not inside a test
from torch import nn
from torch.utils.data import DataLoader

from paceline import session
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare import PreparedDataLoader, accelerate, backward, prepare_model, prepare_optimizer
from paceline.prepare.precision import resolve_precision
from paceline.prepare.scope import close_scope, current_scope
from paceline.testing import make_session


@pytest.fixture(autouse=True)
def _clean():
    yield
    close_scope()


@pytest.fixture
def scaler():
    """As `accelerate` would have made it for float16 on a GPU."""
    scope = current_scope()
    scope.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return scope.scaler


def model_and_sgd(lr=0.5):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("asked", "device_type", "bf16_supported", "got"),
    [
        (False, "cpu", False, None),
        (True, "cpu", False, "bf16"),
        (True, "cuda", True, "bf16"),
        (True, "cuda", False, "fp16"),
        ("bf16", "cpu", False, "bf16"),
        ("fp16", "cuda", True, "fp16"),
    ],
)
def test_precision_suits_the_device(asked, device_type, bf16_supported, got):
    assert resolve_precision(asked, device_type, bf16_supported=bf16_supported) == got


@pytest.mark.parametrize(("asked", "says"), [("fp16", "use mixed_precision='bf16'"), ("fp8", "'fp8'; expected True")])
def test_precision_that_the_cpu_does_not_have(asked, says):
    with pytest.raises(ArgumentError, match=says):
        accelerate(nn.Linear(1, 1), mixed_precision=asked)


def test_accelerate_returns_what_it_was_given_in_order():
    model, optimizer = model_and_sgd()
    loss, loader = nn.MSELoss(), DataLoader([1.0, 2.0])
    everything = accelerate(model, loss, optimizer, loader, nn.functional.mse_loss, mixed_precision=True)
    assert everything[:3] == (model, loss, optimizer)
    assert isinstance(everything[3], PreparedDataLoader)
    assert everything[4] is nn.functional.mse_loss
    assert accelerate(model) is model
    assert accelerate() is None


def test_seeds_line_computes_the_model_in_bfloat16_and_the_loss_in_float32():
    model, loss = accelerate(nn.Linear(4, 1), nn.MSELoss(), mixed_precision=True)
    assert "forward" not in vars(loss)
    x = torch.rand(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = nn.functional.linear(x, model.weight, model.bias)
    assert expected.dtype is torch.bfloat16
    assert torch.equal(model(x), expected.float())
    value = loss(model(x), torch.zeros(8, 1))
    assert value.dtype is torch.float32
    backward(value)
    assert model.weight.grad.dtype is torch.float32


def test_full_precision_is_the_default():
    model = accelerate(nn.Linear(4, 1))
    x = torch.rand(8, 4)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


@pytest.mark.parametrize(
    "prepare", [lambda: prepare_model(nn.Linear(1, 1)), lambda: prepare_optimizer(model_and_sgd()[1])]
)
def test_precision_comes_too_late(prepare):
    prepare()
    with pytest.raises(TrainerStateError, match=r"too late: .* prepared with full precision"):
        accelerate(nn.Linear(1, 1), mixed_precision="bf16")


def test_precision_may_be_said_again_or_left_out_but_not_changed():
    accelerate(nn.Linear(1, 1), mixed_precision="bf16")
    accelerate(nn.Linear(1, 1), mixed_precision=True)
    second = accelerate(nn.Linear(1, 1))
    assert "forward" in vars(second)
    with pytest.raises(TrainerStateError, match="prepared with bf16"):
        accelerate(nn.Linear(1, 1), mixed_precision=False)


def test_loss_and_loader_do_not_fix_the_precision():
    accelerate(nn.MSELoss(), DataLoader([1]))
    assert "forward" in vars(accelerate(nn.Linear(1, 1), mixed_precision=True))


def test_second_run_on_a_worker_starts_clean(monkeypatch):
    for precision in ("bf16", False):
        monkeypatch.setattr(session, "_current", make_session())
        model = accelerate(nn.Linear(1, 1), mixed_precision=precision)
        assert ("forward" in vars(model)) == (precision == "bf16")


def test_something_that_cannot_be_prepared_leaves_the_rest_alone():
    with pytest.raises(ArgumentTypeError, match="given 3 of type int; expected modules, optimizers"):
        accelerate(nn.Linear(1, 1), 3, mixed_precision=True)
    assert current_scope().num_models == 0
    with pytest.raises(ArgumentTypeError, match=r"expected a torch.optim.Optimizer"):
        prepare_optimizer(nn.Linear(1, 1))


def test_optimizer_without_scaling_is_returned_itself():
    _, optimizer = model_and_sgd()
    assert prepare_optimizer(optimizer) is optimizer


def test_scaled_step_equals_the_plain_one(scaler):
    model, optimizer = model_and_sgd()
    optimizer = prepare_optimizer(optimizer)
    backward(3 * model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 3 * 1024
    optimizer.step()
    assert model.weight.item() == 1 - 0.5 * 3
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.item() == 0
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None


def test_overflow_leaves_the_step_out_and_halves_the_scale(scaler):
    model, optimizer = model_and_sgd()
    optimizer = prepare_optimizer(optimizer)
    backward(model(torch.full((1, 1), torch.inf)).sum())
    optimizer.step()
    assert model.weight.item() == 1
    assert optimizer.state_dict()["grad_scaler"]["scale"] == 512.0


def test_optimizers_that_share_a_backward_step_with_one_scale(scaler):
    (a, first), (b, second) = model_and_sgd(), model_and_sgd()
    first, second = prepare_optimizer(first), prepare_optimizer(second)
    backward(a(torch.full((1, 1), torch.inf)).sum() + b(torch.ones(1, 1)).sum())
    first.step()  # overflows, and may not change the scale that the second one's gradients carry
    second.step()
    assert (a.weight.item(), b.weight.item()) == (1.0, 0.5)


def test_scaled_gradients_can_be_unscaled_to_be_clipped(scaler):
    model, optimizer = model_and_sgd()
    optimizer = prepare_optimizer(optimizer)
    backward(8 * model(torch.ones(1, 1)).sum())
    optimizer.unscale()
    assert model.weight.grad.item() == 8
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5


def test_scaled_optimizer_is_an_optimizer_for_a_scheduler(scaler, recwarn):
    model, inner = model_and_sgd(lr=1.0)
    optimizer = prepare_optimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert model.weight.item() == 1 - 1.0 - 0.5
    assert optimizer.param_groups is inner.param_groups
    assert inner.param_groups[0]["lr"] == 0.25
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_scaled_optimizer_passes_everything_else_on(scaler):
    model, inner = model_and_sgd()
    optimizer = prepare_optimizer(inner)
    steps = []
    optimizer.register_step_post_hook(lambda *args: steps.append(args[0]))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    assert len(inner.param_groups) == 2
    backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert steps == [inner]
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert prepare_optimizer(optimizer) is optimizer
    assert "SGD" in repr(optimizer)


def test_scaled_optimizers_state_holds_the_scale_and_loads_into_a_plain_one_too(scaler):
    model, _ = model_and_sgd()
    optimizer = prepare_optimizer(torch.optim.Adam(model.parameters()))
    backward(model(torch.full((1, 1), torch.inf)).sum())
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    scaler.update(new_scale=2.0)
    optimizer.load_state_dict(state)
    assert optimizer.state_dict() == state
    torch.optim.Adam(model.parameters()).load_state_dict(state)
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())


def test_scaled_step_after_a_plain_backward(scaler):
    model, optimizer = model_and_sgd()
    optimizer = prepare_optimizer(optimizer)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(TrainerStateError, match=r"call paceline.backward\(loss\) instead"):
        optimizer.step()
    with pytest.raises(ArgumentTypeError, match="closure"):
        optimizer.step(lambda: None)


def test_scaled_backward_without_a_prepared_optimizer(scaler):
    model, _ = model_and_sgd()
    with pytest.raises(TrainerStateError, match="no optimizer was prepared"):
        backward(model(torch.ones(1, 1)).sum())
