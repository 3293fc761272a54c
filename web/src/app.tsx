// The page: what its document is of.

import type { JSX } from "preact";
import type { Source } from "./data";
import { Profiles } from "./profiles";
import { Comparison } from "./sections/comparison";
import { TraceComparison } from "./sections/trace_comparison";
import { Traces } from "./traces";

export function App({ source }: { source: Source }): JSX.Element {
  const { document } = source;
  switch (document.kind) {
    case "profiles":
      return <Profiles source={source} first={document} />;
    case "comparison":
      return <Comparison source={source} document={document} />;
    case "trace_comparison":
      return <TraceComparison source={source} document={document} />;
    case "traces":
      return <Traces source={source} document={document} />;
  }
}
