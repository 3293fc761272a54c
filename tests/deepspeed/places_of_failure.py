"""Where the profiler is made to fail, for the tests and for what they launch."""

from __future__ import annotations

PLACES = (
    "lightning_flops.session.session.Recorder",
    "lightning_flops.session.session.FlopCounter",
    "lightning_flops.doors.deepspeed_engine.run_context",
    "lightning_flops.doors.deepspeed_engine.engine_output",
    "lightning_flops.doors.deepspeed_engine.settle_steps",
    "lightning_flops.doors.deepspeed_engine.tensor_shapes",
    "lightning_flops.session.results.build_profile",
    "lightning_flops.session.output.render_text",
    "lightning_flops.instrument.recorder.Recorder.enter",
    "lightning_flops.instrument.recorder.Recorder.batch_scope",
    "lightning_flops.instrument.recorder.Recorder.end_batch",
    "lightning_flops.instrument.recorder.Recorder.claim",
    "lightning_flops.instrument.window_states.describe_modules",
    "lightning_flops.instrument.counting.flop_counter.FlopCounter.record",
    "lightning_flops.instrument.timing.phase_timer.PhaseTimer.cut",
    "lightning_flops.instrument.timing.monitor.Monitor.fetch_begins",
    "lightning_flops.instrument.timing.monitor.Monitor.fetch_ends",
)
"""What raises."""
