// How busy host and device were: utilization, pauses, launches, copies, scopes, and every kind of event.

import type { JSX } from "preact";
import { bytes, duration, percent, plain } from "../model/format";
import { perStep, stepsOf, stepWord } from "../model/trace";
import type { IdleTime, TraceReport, UserScopeRow } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { PlainTable, Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

export function HostAndDevice({ trace }: { trace: TraceReport }): JSX.Element {
  const { device_summary: summary, launches, transfers, user_scopes: scopes, idle } = trace;
  const steps = stepsOf(trace);
  return (
    <Section
      id="processors"
      title="Host and device"
      note={`Kinds of events and copies are of one ${stepWord(trace)}; pauses and launches of the whole trace, which lasts ${duration(summary.elapsed_us / 1e6)}.`}
    >
      {trace.device_metrics?.length ? (
        <PlainTable
          caption="Devices"
          head={[
            "device",
            "SMs",
            <Term word="GPU utilization" />,
            <Term word="SM efficiency" />,
            <Term word="occupancy" />,
            <Term word="blocks per SM" />,
          ]}
          rows={trace.device_metrics.map((one) => [
            `${one.device}: ${one.name ?? "not described in the trace"}`,
            plain(one.sm_count),
            <ShareCell share={one.utilization}>{percent(one.utilization, 1)}</ShareCell>,
            percent(one.sm_efficiency, 1),
            percent(one.occupancy_percent === null ? null : one.occupancy_percent / 100, 1),
            plain(one.blocks_per_sm),
          ])}
        />
      ) : null}
      {summary.cpu_process_ratio !== null || summary.cpu_system_ratio !== null ? (
        <p class="note">
          Processor time of the process: {percent(summary.cpu_process_ratio, 1)} of one core; all cores of the machine
          were {percent(summary.cpu_system_ratio, 1)} busy.
        </p>
      ) : null}
      {idle?.length ? <Idle rows={idle} /> : null}
      {launches?.length ? (
        <PlainTable
          caption="Launches"
          head={[
            "launches of",
            "calls",
            "launched",
            "a call takes",
            "what it launched",
            <Term word="launch delay" />,
            "longest delay",
            "shorter than the call",
          ]}
          rows={launches.map((one) => [
            one.kind === "kernel" ? "kernels" : one.kind === "memcpy" ? "copies" : "memsets",
            plain(one.launches),
            plain(one.events),
            duration(one.host.mean_us / 1e6),
            duration(one.device.mean_us / 1e6),
            duration(one.delay.mean_us / 1e6),
            duration(one.delay.max_us / 1e6),
            `${plain(one.shorter_than_launch)} (${percent(one.events ? one.shorter_than_launch / one.events : null, 0)})`,
          ])}
        />
      ) : null}
      {transfers?.length ? (
        <PlainTable
          caption="Copies and memsets"
          head={["copies and memsets", "calls", "bytes", "on the device", "a second", "the calls on the host"]}
          rows={transfers.map((one) => [
            one.name,
            plain(one.calls / steps),
            one.bytes === null ? "n/a" : bytes(one.bytes / steps),
            duration(perStep(one.device, steps)),
            one.bytes === null || !one.device.total_us ? "n/a" : `${bytes((one.bytes / one.device.total_us) * 1e6)}/s`,
            duration(perStep(one.host, steps)),
          ])}
        />
      ) : null}
      {scopes?.length ? <Scopes rows={scopes} steps={steps} /> : null}
    </Section>
  );
}

/** Pauses of each device, and of its streams, by what caused them. */
function Idle({ rows }: { rows: readonly IdleTime[] }): JSX.Element {
  const whole = (one: IdleTime): number => one.busy_us + one.host_wait_us + one.kernel_gap_us + one.other_us;
  const cell = (one: IdleTime, us: number): JSX.Element => {
    const share = whole(one) ? us / whole(one) : null;
    return (
      <ShareCell share={share}>
        {duration(us / 1e6)} <span class="dim">{percent(share, 1)}</span>
      </ShareCell>
    );
  };
  return (
    <PlainTable
      caption="Pauses"
      head={[
        "from first to last event of",
        "busy",
        <Term word="waiting for the host" />,
        <Term word="gap between kernels" />,
        <Term word="other pauses" />,
      ]}
      rows={rows
        .slice(0, 40)
        .map((one) => [
          one.stream === null ? <b>device {one.device}</b> : `device ${one.device}, stream ${one.stream}`,
          cell(one, one.busy_us),
          cell(one, one.host_wait_us),
          cell(one, one.kernel_gap_us),
          cell(one, one.other_us),
        ])}
    />
  );
}

function Scopes({ rows, steps }: { rows: readonly UserScopeRow[]; steps: number }): JSX.Element {
  return (
    <>
      <h3>Scopes of the program</h3>
      <SearchableGrid
        caption="Scopes of the program"
        what="scopes"
        searched={(one) => one.name}
        first={{ key: "host", down: true }}
        keyOf={(one) => one.name}
        rows={rows}
        columns={[
          {
            key: "name",
            label: "record_function",
            text: true,
            value: (one) => one.name,
            cell: (one) => <code>{one.name}</code>,
          },
          { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls / steps) },
          {
            key: "host",
            label: "host",
            value: (one) => one.host.total_us,
            cell: (one) => <ShareCell share={one.host.ratio}>{duration(perStep(one.host, steps))}</ShareCell>,
          },
          {
            key: "mean",
            label: "of a call",
            value: (one) => one.host.mean_us,
            cell: (one) => duration(one.host.mean_us / 1e6),
          },
          ...(rows.some((one) => one.device !== null)
            ? [
                {
                  key: "device",
                  label: "launched in it",
                  value: (one: UserScopeRow) => one.device?.total_us ?? null,
                  cell: (one: UserScopeRow) => duration(perStep(one.device, steps)),
                },
              ]
            : []),
        ]}
        height={260}
      />
    </>
  );
}
