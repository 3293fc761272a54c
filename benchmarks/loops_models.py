"""Loops with several models: a GAN, a teacher, a policy that acts, each with its own account of what it does."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .loops_account import BATCH, HIDDEN, IN, OUT, STEPS, Account, loader, loss_of, net, sgd, update
from .loops_own import learn, loop


def _critic() -> nn.Sequential:
    return net(IN, HIDDEN, 1)


def _judged(account: Account, critic: nn.Module, rows: torch.Tensor, sign: float, *, inputs: bool) -> torch.Tensor:
    """The loss of *rows*, whose gradient the *inputs* may need."""
    account.forward(critic, len(rows))
    account.backward(critic, len(rows), inputs=inputs)
    found: torch.Tensor = sign * critic(rows).mean()
    return found


def _gan(account: Account, order: str, given: str, *, every: int = 1) -> None:
    generator, critic = net(IN, HIDDEN, IN), _critic()
    optimizers = {"g": sgd(generator), "d": sgd(critic)}
    models = {"g": generator, "d": critic}
    what = {name: models[name] for name in given} if len(given) > 1 else models[given]

    def critic_learns(rows: torch.Tensor) -> None:
        account.pause(0.5)
        fake = generator(torch.randn(BATCH, IN)).detach()
        account.forward(generator, BATCH)
        _judged(account, critic, rows, 1.0, inputs=False).backward()
        _judged(account, critic, fake, -1.0, inputs=False).backward()
        update(optimizers["d"])

    def generator_learns() -> None:
        account.pause(0.5)
        fake = generator(torch.randn(BATCH, IN))
        account.forward(generator, BATCH)
        account.backward(generator, BATCH)
        _judged(account, critic, fake, 1.0, inputs=True).backward()
        update(optimizers["g"])

    with account.profiled(what, [optimizers[name] for name in given]):
        for number, rows in enumerate(account.fetches(loader(account, (1 + every // 2) * STEPS)), 1):
            account.handled(len(rows))
            if order == "gd" and number % every == 0:
                generator_learns()
            critic_learns(rows)
            if order == "dg" and number % every == 0:
                generator_learns()
            account.step()


@loop("GAN: D then G, [D, G] given")
def gan(account: Account) -> None:
    _gan(account, "dg", "dg")


@loop("GAN: D then G, [G, D] given")
def gan_other_list(account: Account) -> None:
    _gan(account, "dg", "gd")


@loop("GAN: G then D")
def gan_g_first(account: Account) -> None:
    _gan(account, "gd", "gd")


@loop("GAN: D alone given")
def gan_one_given(account: Account) -> None:
    _gan(account, "dg", "d")


@loop("GAN: G each fourth time", varies=True)
def gan_in_turns(account: Account) -> None:
    _gan(account, "dg", "dg", every=4)


@loop("a second model trains, not given")
def second_model(account: Account) -> None:
    first, second = net(), net()
    optimizers = sgd(first), sgd(second)
    with account.profiled(first, optimizers[0]):
        for rows in account.fetches(loader(account)):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                account.pause(0.5)
                loss_of(model(rows)).backward()
                account.trained(model, len(rows), samples=0, micro_steps=0)
                update(optimizer)
            account.handled(len(rows))
            account.step()


def _taught(account: Account, *, first: bool, given: bool) -> None:
    student, teacher = net(), net(IN, 64, OUT).eval()
    optimizer = sgd(student)
    with account.profiled({"student": student, "teacher": teacher} if given else student, optimizer):
        for rows in account.fetches(loader(account)):
            output = None if first else student(rows)
            with torch.no_grad():
                account.pause()
                wanted = teacher(rows)
            output = student(rows) if output is None else output
            functional.mse_loss(output, wanted).backward()
            account.forward(teacher, len(rows))
            account.trained(student, len(rows))
            update(optimizer)
            account.step()


@loop("teacher first")
def teacher_first(account: Account) -> None:
    _taught(account, first=True, given=True)


@loop("teacher after the student")
def teacher_after(account: Account) -> None:
    _taught(account, first=False, given=True)


@loop("teacher not given")
def teacher_not_given(account: Account) -> None:
    _taught(account, first=True, given=False)


@loop("crops of a student and a teacher")
def dino(account: Account) -> None:
    student, teacher = net(), net()
    optimizer = sgd(student)
    with account.profiled({"student": student, "teacher": teacher}, optimizer):
        for crops in account.fetches(loader(account, STEPS, BATCH, IN, IN, IN, IN)):
            account.pause()
            large, small = torch.cat(crops[:2]), torch.cat(crops[2:])
            with torch.no_grad():
                wanted = teacher(large).mean()
            output = torch.cat([student(large), student(small)])
            (output.mean() - wanted).square().backward()
            account.forward(teacher, 2 * BATCH)
            account.trained(student, 4 * BATCH, samples=BATCH)
            update(optimizer)
            account.step()


@loop("averaged weights evaluated")
def averaged(account: Account) -> None:
    model, average = net(), net().eval()
    optimizer = sgd(model)
    held_out = loader(account, 2, 32)
    with account.profiled(model, optimizer):
        for number, rows in enumerate(account.fetches(loader(account)), 1):
            learn(account, model, rows)
            update(optimizer)
            account.step()
            if number % 8 == 0:
                with account.outside(), torch.no_grad():
                    for others in held_out:
                        average(others)


@loop("rollouts in evaluation mode", varies=True)
def rollouts(account: Account) -> None:
    """A policy that acts four times in evaluation mode on what was fetched, and then learns."""
    policy = net()
    optimizer = sgd(policy)
    with account.profiled(policy, optimizer):
        for rows in account.fetches(loader(account)):
            policy.eval()
            with torch.no_grad():
                for _ in range(4):
                    policy(rows)
                    account.pause(0.2)
                    account.forward(policy, len(rows))
            policy.train()
            learn(account, policy, rows, share=0.3)
            update(optimizer)
            account.step()


@loop("PPO: rollouts, then epochs over them", no_wait=True, unknown=True, varies=True)
def ppo(account: Account) -> None:
    """What was acted in evaluation mode is learned in two epochs of four minibatches; nobody fetches anything."""
    policy = net()
    optimizer = sgd(policy)
    with account.profiled(policy, optimizer):
        for _ in range(4):
            policy.eval()
            observed = torch.randn(32, IN)
            with account.undecided(), torch.no_grad():
                for _ in range(4):
                    policy(observed)
                    account.pause(0.2)
                    account.forward(policy, len(observed))
            policy.train()
            for _ in range(2):
                for places in torch.randperm(32).split(BATCH):
                    learn(account, policy, observed[places])
                    update(optimizer)
                    account.step()


@loop("DQN with a target network", no_wait=True)
def dqn(account: Account) -> None:
    online, target = net(), net()
    optimizer = sgd(online)
    with account.profiled({"online": online, "target": target}, optimizer):
        for _ in range(STEPS):
            with torch.no_grad():
                online(torch.randn(1, IN))
                wanted = target(torch.randn(32, IN)).amax(1, keepdim=True)
            account.pause()
            functional.mse_loss(online(torch.randn(32, IN)), wanted.expand(-1, OUT)).backward()
            account.forward(online, 1)
            account.forward(target, 32)
            account.trained(online, 32)
            update(optimizer)
            account.step()


@loop("actor and critic, no loader", no_wait=True)
def actor_critic(account: Account) -> None:
    actor, critic = net(IN, HIDDEN, IN), _critic()
    optimizers = sgd(actor), sgd(critic)
    with account.profiled({"actor": actor, "critic": critic}, optimizers[::-1]):
        for _ in range(STEPS):
            account.pause()
            state = torch.randn(32, IN)
            with torch.no_grad():
                after = actor(state)
            loss_of(critic(after)).backward()
            update(optimizers[1])
            loss_of(critic(actor(state))).backward()
            update(optimizers[0])
            account.forward(actor, 32)
            account.trained(critic, 32)
            account.trained(actor, 32, samples=0, micro_steps=0)
            account.forward(critic, 32)
            account.backward(critic, 32, inputs=True)
            account.step()
