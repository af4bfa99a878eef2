// Package observe shows people what the bus does, and tells them when it does
// not: metrics for Prometheus and OTLP, traces, errors in Sentry, and alerts.
//
// The [Monitor] measures the database, in one process at a time, and sends the
// alerts: of every job that enters the dead letters, within a minute, and of
// thresholds that are passed. Both come out of the database, so that an alert
// outlives the process that saw the failure, and a channel that is dead is
// caught up with later. A channel that fails is logged and raises no alert, so
// that alerts cannot feed themselves.
//
// Personal data (CPF, e-mail addresses, phone numbers) is taken out of what
// goes to Sentry and into spans; see [eventlog.Scrub].
package observe
