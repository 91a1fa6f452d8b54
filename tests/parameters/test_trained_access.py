"""What programs do with trained parameters between and within steps, plain and with these in the store.

A write is right wherever it goes; a read gives true values. Each scenario is a function of a run and of `check`.
"""

import copy
import io
import threading

import pytest
import torch
from live_bytes import Peak
from parameters.frozen_rig import STEPS, WIDTH, assert_away, assert_equal, batch, loss_of
from parameters.test_frozen_access import SCENARIOS as FROZEN
from parameters.test_frozen_access import Product
from parameters.trained_rig import WAYS, Run, adamw, assert_same
from some_rows import one_in
from torch import nn
from torch.nn import functional as F

from offload.parameters.moved_parameter import MovedParameter
from offload.parameters.window import Window

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


def weights(run):
    return [each for each in run.model.parameters() if each.ndim == 2]


@scenario
def clipping_weights(run, check):
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.05, 0.05)
    check(*run.train(2, between=lambda model: [p.data.mul_(0.9) for p in model.parameters()]))


@scenario
def writing_under_no_grad(run, check):
    def decay(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
                parameter += 0.01
            torch._foreach_mul_(list(model.parameters()), 0.9)

    decay(run.model)
    check(*run.train(2, between=decay))


@scenario
def writing_through_views(run, check):
    def write(model):
        for parameter in model.parameters():
            parameter.view(-1).data.mul_(0.9)
            parameter.detach().numpy()[..., 0] = 0.5
            parameter.data[..., 1] = 0.25
            parameter.flatten().detach().add_(0.01)
            with torch.no_grad():
                parameter.view(-1)[:3] = 7
        halves = model.first.weight.chunk(2)
        halves[1].data.zero_()

    write(run.model)
    check(*run.train(2, between=write))


@scenario
def a_view_is_kept_and_written_to_later(run, check):
    view = run.model.first.weight.view(-1)
    data = run.model.blocks[1].into.layer.weight.data
    check(*run.train(2))
    view.data.mul_(0.5)
    data.mul_(0.5)
    check(*run.train(2))
    del view, data
    check(*run.train(2))


@scenario
def writing_between_forward_and_backward(run, check):
    """Autograd refuses it, or does not see it: then backward uses what forward has used, or what is written."""
    loss = loss_of(run.model, 0)
    with torch.no_grad():
        run.model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.optimizer.zero_grad()


@scenario
def an_average_of_weights(run, check):
    averages = [each.detach().clone() for each in run.model.parameters()]

    def average(model):
        with torch.no_grad():
            for held, parameter in zip(averages, model.parameters(), strict=True):
                held.lerp_(parameter, 0.1)
                held.mul_(0.5).add_(parameter, alpha=0.5)

    check(*run.train(3, between=average), *averages)


@scenario
def an_averaged_model(run, check):
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    check(*run.train(3, between=averaged.update_parameters))
    check(*averaged.parameters())
    assert {type(each) for each in averaged.parameters()} == {nn.Parameter}


@scenario
def a_checkpoint_and_back(run, check):
    run.train(2)
    buffer = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
    check(*run.train(2, 2))
    buffer.seek(0)
    found = torch.load(buffer)
    run.model.load_state_dict(found["model"])
    run.optimizer.load_state_dict(found["optimizer"])
    check(*run.everything())
    check(*run.train(2, 2))


@scenario
def a_checkpoint_is_not_changed_by_later_steps(run, check):
    state = copy.deepcopy(run.model.state_dict())
    run.train(2)
    check(*state.values())


@scenario
def a_state_dict_shows_later_steps(run, check):
    """As of plain torch: the dictionary has the parameters' own memory."""
    state = run.model.state_dict()
    run.train(2)
    check(*state.values())


@scenario
def copies(run, check):
    run.train(1)
    copied = copy.deepcopy(run.model)
    assert {(type(each), each.requires_grad) for each in copied.parameters()} == {(nn.Parameter, True)}
    check(*copied.parameters(), copied.eval()(batch(1)))
    buffer = io.BytesIO()
    torch.save(run.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    check(*loaded.parameters())
    assert all(each.requires_grad for each in loaded.parameters())


@scenario
def gradients_of_chosen_parameters(run, check):
    x = batch(0)
    run.model.eval()
    check(*torch.autograd.grad(run.model(x).square().sum(), list(run.model.parameters())))
    run.model(x).square().sum().backward(inputs=[run.model.first.weight])
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.gradients.clear()
    run.model.train()


@scenario
def second_derivatives(run, check):
    run.model.eval()
    parameters = list(run.model.parameters())
    found = torch.autograd.grad(run.model(batch(0)).square().sum(), parameters, create_graph=True)
    check(*torch.autograd.grad(sum(each.square().sum() for each in found), parameters))
    run.model.train()
    run.gradients.clear()


@scenario
def a_function_of_the_program_saves_it(run, check):
    forward = run.model.head.forward
    run.model.head.forward = lambda x: Product.apply(
        F.linear(x, run.model.blocks[0].into.layer.weight[:WIDTH]), (run.model.head.weight)
    )
    check(*run.train(2))
    run.model.head.forward = forward


@scenario
def used_outside_of_the_model(run, check):
    """No hooks of any kind are on there."""
    x = batch(1).requires_grad_()
    for _ in range(3):
        y = x.clone()
        for weight in (run.model.first.weight, run.model.head.weight):
            y = F.linear(y, weight) + y @ weight.t() + torch.einsum("bi,oi->bo", y, weight) + Product.apply(y, weight)
            y.mul_(weight[0])
            y.add_(weight.sum())
        for other in run.model.parameters():
            other.sum()
        y.sum().backward()
        run.optimizer.step()
        check(y, x.grad, *run.gradients)
        run.gradients.clear()
        run.optimizer.zero_grad()


@scenario
def a_product_outside_of_the_model(run, check):
    """The graph would hold the parameter itself, and not its memory."""
    x = batch(1).requires_grad_()
    y = x[:, None] * run.model.first.weight
    with torch.no_grad():
        run.model.eval()(batch(0))
    y.square().sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.model.train()
    check(y, x.grad, *run.gradients)
    run.gradients.clear()


@scenario
def where_hooks_are_forbidden(run, check):
    x = batch(1).requires_grad_()
    with torch.autograd.graph.disable_saved_tensors_hooks("they are forbidden"):
        y = x[:, None] * run.model.first.weight
    with torch.no_grad():
        run.model.eval()(batch(0))
    y.square().sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.gradients.clear()
    run.model.train()
    check(y, x.grad)


@scenario
def views_without_a_graph(run, check):
    """They require gradients as the parameter does, but it gets none from them."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            weight = run.model.first.weight
            views = [weight.view(-1), weight[0], weight.t(), *weight.chunk(2), weight.float(), weight.detach()]
            results = [weight * 2, weight.double(), weight.view(torch.int32)]
            traits = [(each.requires_grad, each.is_leaf, each._is_view()) for each in views + results]
        check(torch.tensor(traits), *views)
        del views
    with torch.no_grad():
        view = run.model.first.weight.view(-1)
    (view * 2).sum().backward()
    assert run.model.first.weight.grad is None
    with pytest.raises(RuntimeError, match="inplace with grad mode enabled"):
        view.mul_(2)


@scenario
def other_memory_in_its_place(run, check):
    run.model.first.weight.data = torch.ones(WIDTH, WIDTH) / 10
    check(*run.train(2))
    run.model.first.weight.data = (torch.ones(WIDTH, WIDTH).t() / 10).contiguous()
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(run.model.parameters()).detach() * 0.9, run.model.parameters()
    )
    check(*run.train(2))


@scenario
def loading_in_place_of_its_own(run, check):
    state = {name: value.clone() * 0.9 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state)
    check(*run.train(2))


@scenario
def a_layer_that_is_replaced(run, check):
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, 3 * WIDTH)
    run.model.blocks[0].into.layer = layer
    run.optimizer.add_param_group({"params": layer.parameters()})
    check(*run.train(2))


@scenario
def another_dtype_and_back(run, check):
    check(*run.model.double().parameters())
    check(*run.model.float().parameters())


@scenario
def an_optimizer_that_is_made_anew(run, check):
    """Whatever was given to `enable`: this one reads and writes parameters as it steps."""
    other = torch.optim.SGD(run.model.parameters(), lr=0.01, momentum=0.9)
    x = batch(0)
    run.model.eval()
    for _ in range(3):
        gradients = torch.autograd.grad(run.model(x).square().mean(), list(run.model.parameters()))
        for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        run.gradients.clear()
        other.step()
        other.zero_grad()
    check(*run.model.parameters())
    run.model.train()


NOT_OF_TRAINED = {
    "addresses and arrays",  # torch gives no array of what requires gradients
    "writing behind the version",
    "it is trained from now on",  # they are
    "a function of the program saves it",  # above
    "it is used by others",
    "what tells of the shape",
    "merging an adapter",
    "other memory while it is in memory",
    "a deep copy",
    "a model that is pickled",
    "layers that are added or replaced",
    "writing through views",
}
OF_FROZEN = {name: function for name, function in FROZEN.items() if name not in NOT_OF_TRAINED}


def play(function, **given):
    run = Run(make=adamw, **given)
    found = []
    torch.manual_seed(1)
    function(run, lambda *values: found.extend(value.detach().clone() for value in values))
    run.optimizer.zero_grad()
    run.gradients.clear()
    found += run.train(2)
    return found, run


def assert_true_values(function, tmp_path, way):
    expected, plain = play(function)
    found, moved = play(function, folder=tmp_path, way=way)
    assert_equal(found, expected)
    assert_same(moved, plain)
    loss_of(moved.model, 0)
    moved.handle.disable()
    assert_same(moved, plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", one_in(3, SCENARIOS))
def test_a_program_sees_and_writes_true_values(name, way, tmp_path):
    assert_true_values(SCENARIOS[name], tmp_path, way)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.full) if each == "transforms of functions" else each for each in OF_FROZEN],
)
def test_as_of_frozen_ones(name, tmp_path):
    with_grad = {"moving to where it is", "another dtype and back", "what is held stays valid"}

    def function(run, check):
        with torch.set_grad_enabled(name in with_grad):
            OF_FROZEN[name](run.model, check)

    assert_true_values(function, tmp_path, "chunks")


def test_nothing_is_read_for_what_is_no_byte(tmp_path):
    run = Run(tmp_path, "chunks")
    loss_of(run.model, 0).backward()
    before = run.handle.report().moved_parameters.in_bytes
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.model.zero_grad()
    run.optimizer.state_dict()
    run.model.to("cpu")
    run.model.train().eval()
    sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    assert run.handle.report().moved_parameters.in_bytes == before


def test_a_penalty_on_all_of_it_holds_little_at_a_time(tmp_path):
    """What autograd saves of them is a reference to the store."""
    run = Run(tmp_path, "chunks", n_tensors=0)
    penalty = sum(each.square().sum() for each in run.model.parameters())
    window = run.handle._enabled.parameters.window
    assert window.nbytes() <= window.ahead.nbytes_max
    with torch.no_grad():
        run.model.eval()(batch(0))
    assert_away(run.model)
    penalty.backward()
    assert_equal([each.grad for each in run.model.parameters()], [2 * each.detach() for each in run.model.parameters()])


def test_autocast_keeps_no_conversion_of_a_tensor_that_stands_for_a_parameter(tmp_path):
    """The parameter is another such tensor in each call, so each call would add a conversion."""
    run, peak = Run(tmp_path, "chunks", n_tensors=0), Peak()
    x, weight = batch(0), run.model.first.weight
    with peak.watch(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(20):
            F.linear(x, weight)
    converted = weight.nbytes // 2
    assert converted <= peak.nbytes < 10 * converted


def test_a_state_dict_leaves_the_class_to_other_threads(tmp_path):
    """A forward in another thread would not be seen while the parameter has its ordinary class."""
    run = Run(tmp_path, "alone")
    run.train(2)
    kinds, acquire = set(), Window.acquire

    def noted(self, parameter, record, user, *, plain=False):
        acquire(self, parameter, record, user, plain=plain)
        kinds.add(type(parameter))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "acquire", noted)
        state = run.model.state_dict()
        assert kinds == {MovedParameter}
        with torch.no_grad():
            assert all(torch.equal(torch.clone(each), state[name]) for name, each in run.model.named_parameters())
        assert kinds == {MovedParameter}


@pytest.mark.full  # about one of forty runs on a busy machine ends with an error of backward, whose cause is not known
def test_training_beside_a_thread_that_reads_all_weights(tmp_path):
    plain, moved = Run(), Run(tmp_path, "alone")
    stop = threading.Event()

    def read():
        while not stop.is_set():
            for each in moved.model.state_dict().values():
                each.clone()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        found = moved.train(STEPS)
    finally:
        stop.set()
        reader.join()
    assert_equal(found, plain.train(STEPS))
    assert_same(moved, plain)
