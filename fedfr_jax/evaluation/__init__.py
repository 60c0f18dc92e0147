"""Evaluation metrics: arrays in, {name: value} out.

`score_tiles` are score matrices that are never in memory as a whole, `error_rates`
their exact error rates. `verification`, `identification` and `templates` (IJB) are of
faces, `personalized` of every client's model; `retrieval` and `rerank` are of
re-identification, `segmentation` of masks, `mmd` compares models' features, and
`samples` chooses what a report shows.
"""
