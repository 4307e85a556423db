"""Measuring: tasks, methods side by side, credit analysis, calibration, fleets, reports.

tasks scoring sandbox           problems, and whether an answer is right
pair methods world              two models with memories, what is compared, one virtual request
bench wall records              every problem by every method, kept on disk
figures report plots            statistics, tables and pictures of records
recorder traces replay          what both models say along a text; models that say it again
windows inertia                 is acceptance correlated in time?
follow sweep training           credit along a trace, labels, the network
calibrate calibration           thresholds that keep accuracy, and the file they go into
crowd fleet                     many users on few engines
plan                            the arithmetic of when to speculate
workers                         processes and threads that the above spread their work over
"""
