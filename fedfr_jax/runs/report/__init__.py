"""Reports of runs: the result table, and charts as specifications and as files.

tables: the result table of the terminal.
charts: kinds of charts as Vega-Lite specifications. run_charts: those of a run's
stages. scaling: those of a scaling study.
drawing: charts, images and grids of images as files.
"""
