def latencies(sent, token_times):
    ttft = token_times[0] - sent
    gaps = len(token_times) - 1
    tpot = (token_times[-1] - token_times[0]) / gaps if gaps else None
    return ttft, tpot


def goodput(requests, seconds, max_ttft, max_tpot):
    kept = 0
    for sent, token_times in requests:
        ttft, tpot = latencies(sent, token_times)
        kept += ttft <= max_ttft and (tpot is None or tpot <= max_tpot)
    return kept / seconds
