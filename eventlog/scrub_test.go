package eventlog_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/eventlog"
)

func TestScrubTakesPersonalDataOut(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"cpf 123.456.789-09 twice 12345678909":                "cpf [cpf] twice [number]",
		"cnpj 12.345.678/0001-95":                             "cnpj [cnpj]",
		"send to ada.love+x@mail.example.com: refused":        "send to [email]: refused",
		`{"phone":"+5511999990000"}`:                          `{"phone":"[phone]"}`,
		"+55 (11) 99999-0000, (11) 99999-0000":                "[phone], [phone]",
		"11 99999-0000 and 3333-4444":                         "[phone] and [phone]",
		"chat 5511999990000@c.us not found":                   "chat [phone] not found",
		"5511999990000":                                       "[number]",
		"job 1234567 of 7f9c2ba4-1234-5678-9012-123456789012": "job 1234567 of 7f9c2ba4-1234-5678-9012-123456789012",
		"at 2026-12-01T10:00:00.123456Z, status 503":          "at 2026-12-01T10:00:00.123456Z, status 503",
		"": "",
	} {
		require.Equal(t, want, eventlog.Scrub(text), text)
	}
}
