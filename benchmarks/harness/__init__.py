"""Parts that several benchmarks use: hubs and nodes as processes (`site`), a scripted hub (`driven_hub`), a scripted
client (`stranger`), models, databases, and the progress and results of a benchmark (`progress`).
"""
