"""Kenpo's algorithms inside verl: on its functions, in its real training worker, through its real queue of columns.

`make hosts` runs this in an environment that has verl.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="runs in the environment of `make hosts`")
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

import torch  # noqa: E402

import kenpo  # noqa: E402
from kenpo.errors import InputError  # noqa: E402
from kenpo.integrations import verl as plugin  # noqa: E402
from kenpo.integrations.verl_config import PREFIX, route, why_not_registries  # noqa: E402

HERE = Path(__file__).parent
REGISTERED = [n for n in kenpo.names() if why_not_registries(kenpo.get(n)) is None]


def rows(seed=0, size=12, width=7):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    lengths = torch.randint(1, width + 1, (size,), generator=g)
    mask = (torch.arange(width) < lengths[:, None]).long()
    scores = torch.zeros(size, width, dtype=torch.float64).scatter(1, lengths[:, None] - 1, draw(size, 1))
    logp = -draw(size, width).abs() - 0.1
    return {"mask": mask, "scores": scores, "logp": logp, "old": logp + 0.3 * draw(size, width),
            "sampler": logp + 0.3 * draw(size, width), "ref": logp + 0.3 * draw(size, width),
            "entropy": draw(size, width).abs(), "uid": [str(i // 4) for i in range(size)]}  # fmt: skip


def rollouts(r, **fields):
    return kenpo.Rollouts(
        mask=plugin.place(r["mask"]).bool(), group=plugin.numbered(r["uid"]), rewards=r["scores"].sum(1),
        prompt_id=plugin.numbered(r["uid"]), **{n: plugin.place(r[v]) for n, v in fields.items()},
    )  # fmt: skip


def actor(**changes):
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=2,
                       use_dynamic_bsz=False, **changes)  # fmt: skip


def test_a_third_of_the_catalogue_goes_through_the_registries_and_nearly_all_of_it_by_coefficients():
    assert len(REGISTERED) >= 24
    ways = {}
    for name in kenpo.names():
        try:
            ways[name] = route(kenpo.get(name))
        except InputError as error:
            ways[name] = str(error)
    assert sum(w in ("registries", "coefficients") for w in ways.values()) >= 62


@pytest.mark.parametrize("name", REGISTERED)
def test_the_registries_give_the_coefficients_of_one_evaluation(name):
    a = kenpo.get(name)
    if a.settings().get("aggregate.length", 0) is None:
        a = a.with_settings({"aggregate.length": 7})
    plugin.register(a)
    r = rows()
    want = kenpo.evaluate(a, rollouts(r, logp_old="old"), kenpo.Policy(plugin.place(r["logp"])))
    advantages, _ = plugin.ADV_ESTIMATOR_REGISTRY[PREFIX + name](
        token_level_rewards=r["scores"], response_mask=r["mask"], index=r["uid"]
    )
    logp = r["logp"].clone().requires_grad_()
    total = 0.0
    for rank in (range(0, 5), range(5, 12)):  # two ranks, microbatches of three and what is left
        for first in range(rank.start, rank.stop, 3):
            cut = slice(first, min(first + 3, rank.stop))
            info = {"dp_size": 2, "batch_num_tokens": int(r["mask"].sum()), "global_batch_size": 12}
            config = actor()
            config.global_batch_info.update(info)
            loss, _ = plugin.POLICY_LOSS_REGISTRY[PREFIX + name](
                old_log_prob=r["old"][cut], log_prob=logp[cut], advantages=advantages[cut],
                response_mask=r["mask"][cut], loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
            )  # fmt: skip
            total = total + loss / 2  # verl averages over ranks
    total.backward()
    assert torch.allclose(logp.grad, want.coefficients[:, 1:], rtol=1e-12, atol=1e-12)
    assert float(total.detach()) == pytest.approx(float(want.loss), rel=1e-12, abs=1e-12)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Errors of verl's real worker by number of ranks and name."""
    sys.path.insert(0, str(HERE.parent))
    from tiny import qwen3
    from transformers import AutoTokenizer

    from kenpo.models.loading import BUNDLED

    folder = tmp_path_factory.mktemp("model")
    qwen3(vocab=64, tie_word_embeddings=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(BUNDLED)).save_pretrained(folder)
    found = {}
    for ranks, port, names in ((1, 29711, ["gspo", "m2po"]), (2, 29712, list(IN_WORKER))):
        out = folder / f"{ranks}.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(port),
            str(HERE / "verl_run.py"),
            "--folder",
            str(folder),
            "--out",
            str(out),
            "--names",
            *names,
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)  # fmt: skip
        found[ranks] = json.loads(out.read_text())
    return found


IN_WORKER = {
    "gspo": "registries", "cispo": "registries", "luspo": "registries", "rloo": "registries",
    "m2po": "coefficients", "dapo": "coefficients", "stapo": "coefficients", "tis": "coefficients",
}  # fmt: skip


@pytest.mark.parametrize("name", IN_WORKER)
def test_the_real_worker_moves_by_the_gradient_of_one_evaluation(name, updates):
    assert updates[2][name]["route"] == IN_WORKER[name]
    assert updates[2][name]["error"] < 1e-5
    if name in updates[1]:
        assert updates[1][name]["error"] < 1e-5


@pytest.fixture(scope="module")
def queue():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=200 << 20)
    import transfer_queue as tq

    tq.init()
    yield tq
    ray.shutdown()


@pytest.mark.parametrize("name", ["m2po", "stapo", "dapo", "grpo"])
def test_through_the_real_queue_the_column_equals_one_evaluation(name, queue):
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    from kenpo.integrations.verl_trainer import KenpoTrainer

    r = rows(seed=3)
    a = kenpo.get(name)
    keys = [f"{name}{u}_{i}_0" for i, u in enumerate(r["uid"])]
    nested = torch.nested.as_nested_tensor([m[: int(m.sum())] for m in r["mask"]], layout=torch.jagged)
    columns = {"rm_scores": "scores", "old_log_probs": "logp", "rollout_log_probs": "sampler",
               "ref_log_prob": "ref", "entropy": "entropy"}  # fmt: skip
    fields = {n: response_to_nested(r[v].float(), nested) for n, v in columns.items()}
    queue.kv_batch_put(keys=keys, partition_id="train", tags=[{} for _ in keys],
                       fields=TensorDict({**fields, "response_mask": nested}, batch_size=len(keys)))  # fmt: skip
    trainer = object.__new__(KenpoTrainer)
    trainer.algorithm, trainer.stream = a, None
    batch = Keys(keys)
    KenpoTrainer._compute_advantage(trainer, batch, {})
    got = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])["advantages"]
    single = {n: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in r.items()}
    made = rollouts(single, logp_sampler="sampler", logp_ref="ref")
    policy = kenpo.Policy(plugin.place(single["logp"]), entropy=plugin.place(single["entropy"]))
    want = kenpo.evaluate(a, made, policy).coefficients[:, 1:]
    for row, mask, expected in zip(got.unbind(), r["mask"], want, strict=True):
        assert torch.equal(row, expected[: int(mask.sum())])


class Keys(SimpleNamespace):
    """A batch's keys, as verl's trainer hands them on."""

    def __init__(self, keys):
        super().__init__(keys=keys, partition_id="train")

    def __len__(self):
        return len(self.keys)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("clip_ratio", 0.1), ("clip_ratio_low", 0.1), ("clip_ratio_high", 0.28), ("loss_agg_mode", "seq-mean-token-mean")],
)
def test_a_knob_that_would_do_nothing_is_refused(knob, value):
    r = rows()
    config = actor(**{knob: value})
    config.global_batch_info.update({"dp_size": 1, "batch_num_tokens": 10, "global_batch_size": 12})
    with pytest.raises(InputError, match=rf"actor\.{knob}={value!r}"):
        plugin.POLICY_LOSS_REGISTRY[PREFIX + "gspo"](
            old_log_prob=r["old"], log_prob=r["logp"], advantages=r["old"], response_mask=r["mask"], config=config
        )


def test_a_worker_that_was_started_without_the_module_is_told():
    held = plugin.POLICY_LOSS_REGISTRY.pop(PREFIX + "gspo")
    try:
        with pytest.raises(InputError, match="VERL_USE_EXTERNAL_MODULES"):
            plugin.check_registered("gspo")
    finally:
        plugin.POLICY_LOSS_REGISTRY[PREFIX + "gspo"] = held
    assert plugin.check_registered("kenpo:gspo") == "registries"


def test_verl_loads_it_as_an_external_module_with_algorithms_of_ones_own(tmp_path):
    (tmp_path / "my.py").write_text(
        "import kenpo\nMINE = kenpo.get('gspo').but(name='mine').with_settings({'surrogate.low': 0.001})\n"
    )
    code = (
        "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn; get_policy_loss_fn('kenpo:mine');"
        "from kenpo.integrations.verl import check_registered; print(check_registered('mine'))"
    )
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "kenpo.integrations.verl",
           "KENPO_ALGORITHMS": f"{tmp_path}/my.py:MINE"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("registries"), done.stderr[-2000:]
