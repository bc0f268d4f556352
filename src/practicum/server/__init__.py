"""The service: several base models behind HTTP that sample, score and train through the Tinker API.

app        routes and statuses
limits     the size of one request; protocol: close connections without headers
service    sessions, models and samplers: turns requests into jobs
catalogue  models, runs and checkpoints, without a job
executor   sampling requests on the worker thread, which holds the models
shelf      base models, loaded on demand; the least recently used model is evicted
training   adapters in training, each set with its optimizer
saving     training models to and from checkpoints
store      checkpoints on disk
worker     the thread, its queue, its batches and their turns
sessions   clients' sessions, and the search among them
futures    answers that are fetched later
wire       protobuf messages; requests: JSON bodies
"""
