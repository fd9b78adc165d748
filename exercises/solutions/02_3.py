import torch


def online_softmax(tiles):
    top, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), 0.0
    for scores, values in tiles:
        new_top = torch.maximum(top, scores.max())
        base = torch.zeros(()) if new_top == -torch.inf else new_top
        weights, shrink = (scores - base).exp(), (top - base).exp()
        total = total * shrink + weights.sum()
        acc = acc * shrink + weights @ values
        top = new_top
    if total == 0:
        return torch.zeros_like(acc), torch.tensor(-torch.inf)
    return acc / total, top + total.log()
