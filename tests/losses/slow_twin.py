"""The loss of an objective, token by token in float64, written from the papers and not from the library."""

import torch

from practicum.objective import Objective, Pathwise


def slow_loss(student_logits, teacher_logits, data, objective: Objective):
    """Return a differentiable scalar: `student_logits` are [T, V] at the supervised tokens of all rollouts, end to end."""
    tokens = _supervised(data)
    lengths = [sum(token["row"] == row for token in tokens) for row in range(len(data))]
    for place, token in enumerate(tokens):
        token["S"] = torch.log_softmax(student_logits[place], dim=-1)
        token["T"] = torch.log_softmax(teacher_logits[place], dim=-1)
        token["logp"] = token["S"][token["id"]]
        token["share"] = _share(objective, token["row"], lengths)
    return sum(_term_loss(term, tokens, data) for term in objective.losses)


def _supervised(data):
    tokens = []
    for row, datum in enumerate(data):
        rollout = datum.rollout
        for position in range(len(rollout.tokens)):
            if rollout.loss_mask[position]:
                tokens.append(
                    {
                        "row": row,
                        "position": position,
                        "id": int(rollout.tokens[position]),
                        "sampler": float(rollout.sampling_logprobs[position]),
                    }
                )
    return tokens


def _share(objective, row, lengths):
    sequences = sum(length > 0 for length in lengths)
    return {
        "token_mean": 1 / sum(lengths),
        "seq_mean_token_mean": 1 / (sequences * lengths[row]),
        "seq_mean_token_sum": 1 / sequences,
        "seq_mean_token_sum_norm": 1 / (sequences * (objective.aggregate_norm or 1.0)),
    }[objective.aggregate]


def _term_loss(term, tokens, data):
    parameter = next(iter(term.divergence.arguments.values()), None)
    values = [
        None if term.signal.name == "sampled" else _value(term, token, parameter)
        for token in tokens
    ]
    pathwise = term.gradient.type == "pathwise"
    returns = (
        [torch.tensor(-1.0, dtype=torch.float64)] * len(tokens)
        if pathwise
        else _returns(term, tokens, values, data)
    )
    weights = _weights(term, tokens, values)
    factors = _corrections(term, tokens, returns)
    total = torch.zeros((), dtype=torch.float64)
    for place, token in enumerate(tokens):
        reward = data[token["row"]].rollout.reward
        kept = {
            "all": True,
            "correct": reward is not None and reward >= 1,
            "incorrect": reward is not None and reward < 1,
        }[term.filter]
        if kept:
            coefficient = term.coefficient * token["share"] * weights[place] * factors[place]
            differentiable = values[place] if pathwise else token["logp"] * -returns[place].detach()
            total = total + coefficient * differentiable
    return total


def _value(term, token, parameter):
    if term.signal.name == "entropy":
        return (token["S"].exp() * token["S"]).sum()
    student, teacher = token["S"], _target(term.target, token["S"].detach(), token["T"])
    if term.signal.name == "full":
        return _divergence(term.divergence.name, student.exp(), teacher.exp(), parameter)
    chosen = _chosen(term.signal, student, teacher)
    student_part, teacher_part = student[chosen].exp(), teacher[chosen].exp()
    tail = term.signal.tail
    if tail == "bucket":
        student_part = torch.cat([student_part, 1 - student_part.sum()[None]])
        teacher_part = torch.cat([teacher_part, 1 - teacher_part.sum()[None]])
    if tail == "renorm":
        student_part, teacher_part = (
            student_part / student_part.sum(),
            teacher_part / teacher_part.sum(),
        )
    value = _divergence(term.divergence.name, student_part, teacher_part, parameter)
    if tail == "sampled" and token["id"] not in chosen:
        assert term.divergence.name == "reverse_kl"
        slope = (token["logp"] - teacher[token["id"]] + 1).detach()
        value = value + slope * (token["logp"] - token["logp"].detach())
    return value


def _target(target, student, teacher):
    if target.type == "log_linear":
        return torch.log_softmax(target.teacher * teacher + target.student * student, dim=-1)
    if target.type == "mixture":
        return (target.teacher * teacher.exp() + (1 - target.teacher) * student.exp()).log()
    return torch.log_softmax(teacher / target.temperature, dim=-1)


def _chosen(signal, student, teacher):
    of_student, of_teacher = (
        student.topk(signal.k).indices.tolist(),
        teacher.topk(signal.k).indices.tolist(),
    )
    return {
        "student": of_student,
        "teacher": of_teacher,
        "union": of_student + [token for token in of_teacher if token not in of_student],
        "intersection": [token for token in of_student if token in of_teacher],
    }[signal.support]


def _divergence(name, s, t, parameter):
    def kl(p, q):
        return (p * (p.log() - q.log())).sum()

    if name == "jsd":
        middle = parameter * t + (1 - parameter) * s
        return parameter * kl(t, middle) + (1 - parameter) * kl(s, middle)
    if name == "skew_forward_kl":
        return kl(t, parameter * t + (1 - parameter) * s)
    if name == "skew_reverse_kl":
        return kl(s, (1 - parameter) * t + parameter * s)
    return {"reverse_kl": lambda: kl(s, t), "forward_kl": lambda: kl(t, s)}[name]()


def _returns(term, tokens, values, data):
    advantages = []
    for place, token in enumerate(tokens):
        learner = (
            token["logp"].detach() if term.advantage_logprob == "learner" else token["sampler"]
        )
        teacher = _sampled_target(term, token)
        advantage = {"reverse_kl": teacher - learner, "forward_kl": (teacher - learner).exp() - 1}[
            term.divergence.name
        ]
        advantages.append(advantage * _past(term, tokens, place))
    gamma = getattr(term.gradient, "gamma", 0.0)
    returns = [
        sum(
            gamma ** (later - place) * advantages[later]
            for later in range(place, len(tokens))
            if tokens[later]["row"] == token["row"]
        )
        for place, token in enumerate(tokens)
    ]
    baseline = getattr(term.gradient, "baseline", "none")
    if baseline == "kl":
        return [
            value + values[place].detach() * _past(term, tokens, place)
            for place, value in enumerate(returns)
        ]
    if baseline == "none":
        return returns
    centred = []
    for place, token in enumerate(tokens):
        group = data[token["row"]].rollout.prompt.id
        others = [
            value
            for value, other in zip(returns, tokens, strict=True)
            if other["row"] != token["row"] and data[other["row"]].rollout.prompt.id == group
        ]
        mean = sum(others) / len(others) if others else 0.0
        centred.append(returns[place] - mean * _past(term, tokens, place))
    return centred


def _past(term, tokens, place):
    """Return the product of the ratios of a sequence up to a token, where the correction uses it."""
    past = 1.0
    if term.correction.name == "prefix_ratio":
        for earlier in tokens[: place + 1]:
            if earlier["row"] == tokens[place]["row"]:
                past = past * (earlier["logp"].detach() - earlier["sampler"]).exp()
    return past


def _sampled_target(term, token):
    if term.target.type == "log_linear" and term.signal.name == "sampled":
        return _target(term.target, token["S"].detach(), token["T"])[token["id"]]
    return _target(term.target, token["S"].detach(), token["T"])[token["id"]]


def _corrections(term, tokens, returns):
    arguments = term.correction.arguments
    factors = []
    for place, token in enumerate(tokens):
        ratio = (token["logp"].detach() - token["sampler"]).exp().item()
        past = 1.0
        for earlier in range(place + 1):
            if tokens[earlier]["row"] == token["row"]:
                past *= (tokens[earlier]["logp"].detach() - tokens[earlier]["sampler"]).exp().item()
        name = term.correction.name
        if name == "ratio_clip":
            gone = (
                ratio > 1 + arguments["high"]
                if returns[place] > 0
                else ratio < 1 - arguments["low"]
            )
            factors.append(0.0 if gone else ratio)
        elif name == "ratio_mask":
            factors.append(ratio if arguments["low"] <= ratio <= arguments["high"] else 0.0)
        elif name == "ratio_truncate":
            factors.append(min(ratio, arguments["maximum"]))
        else:
            # A state is reached by the tokens before it; a score function weighs its advantages instead (`_returns`).
            state = past / ratio if isinstance(term.gradient, Pathwise) else 1.0
            factors.append({"none": 1.0, "ratio": ratio, "prefix_ratio": state}[name])
    return factors


def _weights(term, tokens, values):
    name, arguments = term.weights.name, term.weights.arguments
    if name == "all":
        return [1.0] * len(tokens)
    if name == "prefix":
        return [float(token["position"] < arguments["length"]) for token in tokens]
    if name == "accepted":
        weights = []
        for token in tokens:
            of = token["id"] if arguments["of"] == "sampled" else token["S"].argmax().item()
            rank = sum(value > token["T"][of] for value in token["T"].tolist())
            weights.append(1.0 if rank < arguments["k"] else arguments["rejected"])
        return weights
    entropies = {
        side: [-(token[side].exp() * token[side]).sum().item() for token in tokens]
        for side in ("S", "T")
    }
    measures = {
        "student_entropy": entropies["S"],
        "teacher_entropy": entropies["T"],
        "divergence": [None if value is None else value.item() for value in values],
        "logprobs": [token["logp"].item() for token in tokens],
        "teacher_logprobs": [token["T"][token["id"]].item() for token in tokens],
    }
    if name == "threshold":
        return [float(value > arguments["above"]) for value in measures[arguments["statistic"]]]
    if name == "entropy_top":
        score = measures[f"{arguments['model']}_entropy"]
    elif name == "divergence_top":
        score = measures["divergence"]
    else:
        h = [value / max(measures["student_entropy"]) for value in measures["student_entropy"]]
        d = [value / max(measures["divergence"]) for value in measures["divergence"]]
        score = [a + b - a * b for a, b in zip(h, d, strict=True)]
    count = -(-len(tokens) * int(arguments["fraction"] * 100) // 100)
    best = sorted(range(len(tokens)), key=lambda place: -score[place])[:count]
    return [float(place in best) for place in range(len(tokens))]
