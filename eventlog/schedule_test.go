package eventlog_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/eventlog"
)

// Clocks that are moved: New York by an hour at 02:00, São Paulo at midnight,
// Lord Howe by half an hour at 02:00, and Samoa, which left out a day.
func TestTicksWhereClocksChange(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		spec, zone, after string
		want              []string // local, with the offset
	}{
		"daily, in the gap": {
			"30 2 * * *", "America/New_York", "2027-03-13T00:00:00-05:00",
			[]string{"2027-03-13T02:30:00-05:00", "2027-03-14T03:00:00-04:00", "2027-03-15T02:30:00-04:00"},
		},
		"twice in the gap": {
			"0,30 2 * * *", "America/New_York", "2027-03-13T12:00:00-05:00",
			[]string{"2027-03-14T03:00:00-04:00", "2027-03-15T02:00:00-04:00"},
		},
		"daily, at the end of the gap": {
			"0 2,3 * * *", "America/New_York", "2027-03-13T12:00:00-05:00",
			[]string{"2027-03-14T03:00:00-04:00", "2027-03-15T02:00:00-04:00"},
		},
		"daily, in the fold": {
			"30 1 * * *", "America/New_York", "2027-11-06T12:00:00-04:00",
			[]string{"2027-11-07T01:30:00-04:00", "2027-11-08T01:30:00-05:00"},
		},
		"half-hourly through the gap": {
			"*/30 * * * *", "America/New_York", "2027-03-14T01:00:00-05:00",
			[]string{"2027-03-14T01:30:00-05:00", "2027-03-14T03:00:00-04:00", "2027-03-14T03:30:00-04:00"},
		},
		"half-hourly through the fold": {
			"*/30 * * * *", "America/New_York", "2027-11-07T00:59:00-04:00",
			[]string{
				"2027-11-07T01:00:00-04:00", "2027-11-07T01:30:00-04:00", "2027-11-07T01:00:00-05:00", "2027-11-07T01:30:00-05:00",
				"2027-11-07T02:00:00-05:00",
			},
		},
		"every second hour through the gap": {
			"0 */2 * * *", "America/New_York", "2027-03-14T00:00:00-05:00",
			[]string{"2027-03-14T03:00:00-04:00", "2027-03-14T04:00:00-04:00"},
		},
		"midnight that is not there": {
			"0 0 * * *", "America/Sao_Paulo", "2018-11-02T12:00:00-03:00",
			[]string{"2018-11-03T00:00:00-03:00", "2018-11-04T01:00:00-02:00", "2018-11-05T00:00:00-02:00"},
		},
		"midnight that comes twice": {
			"30 23 * * *", "America/Sao_Paulo", "2018-02-17T12:00:00-02:00",
			[]string{"2018-02-17T23:30:00-02:00", "2018-02-18T23:30:00-03:00"},
		},
		"half an hour's gap": {
			"15 2 * * *", "Australia/Lord_Howe", "2027-10-02T12:00:00+10:30",
			[]string{"2027-10-03T02:30:00+11:00", "2027-10-04T02:15:00+11:00"},
		},
		"half an hour's fold": {
			"45 1 * * *", "Australia/Lord_Howe", "2027-04-03T12:00:00+11:00",
			[]string{"2027-04-04T01:45:00+11:00", "2027-04-05T01:45:00+10:30"},
		},
		"half-hourly through half an hour's gap": {
			"*/30 * * * *", "Australia/Lord_Howe", "2027-10-03T01:15:00+10:30",
			[]string{"2027-10-03T01:30:00+10:30", "2027-10-03T02:30:00+11:00", "2027-10-03T03:00:00+11:00"},
		},
		"a day that is not there": {
			"0 12 * * *", "Pacific/Apia", "2011-12-29T13:00:00-10:00",
			[]string{"2011-12-31T00:00:00+14:00", "2011-12-31T12:00:00+14:00"},
		},
		"a leap day": {
			"0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", []string{"2028-02-29T00:00:00Z", "2032-02-29T00:00:00Z"},
		},
		"every so often": {
			"@every 90m", "America/New_York", "2027-03-14T00:10:00-05:00",
			[]string{"2027-03-14T01:00:00-05:00", "2027-03-14T03:30:00-04:00"},
		},
		"daily": {"@daily", "Asia/Tokyo", "2026-01-01T00:00:00+09:00", []string{"2026-01-02T00:00:00+09:00"}},
	} {
		zone, err := time.LoadLocation(tt.zone)
		require.NoError(t, err)
		at, err := time.Parse(time.RFC3339, tt.after)
		require.NoError(t, err)
		ticks, err := eventlog.Ticks(tt.spec, tt.zone, at, at.AddDate(20, 0, 0), len(tt.want))
		require.NoError(t, err, name)
		var got []string
		for _, tick := range ticks {
			got = append(got, tick.In(zone).Format(time.RFC3339))
		}
		require.Equal(t, tt.want, got, name)
	}
}

// Whatever the zone, ticks only go forward and are the same ones wherever one
// begins to count, and a daily cron ticks once a day, but for the day that Samoa
// left out, which it makes up for.
func TestTicksGoForwardInEveryZone(t *testing.T) {
	t.Parallel()
	start := time.Date(2011, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, zone := range []string{
		"UTC", "America/New_York", "America/Sao_Paulo", "Australia/Lord_Howe", "Africa/Casablanca", "Pacific/Apia",
		"Antarctica/Troll",
	} {
		location, err := time.LoadLocation(zone)
		require.NoError(t, err)
		for _, spec := range []string{"30 2 * * *", "0 0 * * *", "0,20 1-3 * * *", "*/30 * * * *", "@every 7h"} {
			ticks, err := eventlog.Ticks(spec, zone, start, start.AddDate(1, 0, 0), 100_000)
			require.NoError(t, err)
			days := make(map[string]int)
			for i := 1; i < len(ticks); i++ {
				require.True(t, ticks[i].After(ticks[i-1]), "%s %s %s", zone, spec, ticks[i])
				days[ticks[i].In(location).Format(time.DateOnly)]++
			}
			rest, err := eventlog.Ticks(spec, zone, ticks[100].Add(-time.Second), start.AddDate(1, 0, 0), 100_000)
			require.NoError(t, err)
			require.Equal(t, ticks[100:], rest, "%s %s", zone, spec)
			delete(days, "2011-12-31")
			if spec == "30 2 * * *" || spec == "0 0 * * *" {
				for day, n := range days {
					require.Equal(t, 1, n, "%s %s on %s", spec, zone, day)
				}
			}
		}
	}
}

func TestSpecsThatAreRefused(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string]string{
		"0 0 30 2 *":              "never fires",
		"* * *":                   "expected exactly 5 fields",
		"0 0 0 * * *":             "expected exactly 5 fields",
		"60 * * * *":              "above maximum",
		"":                        "empty spec",
		"@reboot":                 "unrecognized",
		"@every 0s":               "",
		"@every -1m":              "",
		"TZ=Asia/Tokyo 0 0 * * *": "place of its own",
	} {
		_, err := eventlog.Ticks(spec, "UTC", time.Now(), time.Now(), 1)
		require.ErrorContains(t, err, want, spec)
	}
	for _, zone := range []string{"Mars/Olympus", "Local", "../etc/passwd", "UTC\x00"} {
		_, err := eventlog.Ticks("@daily", zone, time.Now(), time.Now(), 1)
		require.ErrorContains(t, err, "is unknown", zone)
	}
}
