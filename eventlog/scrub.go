package eventlog

import "regexp"

// personalRE finds what may be personal data, and UUIDs, whose digits are not:
// of alternatives that begin at one place, the first one wins.
var personalRE = regexp.MustCompile(`(?i)` +
	`(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)` +
	`|(?P<chat>\b\d{8,20}@[a-z][a-z.]*\b)` + // of WAHA: a phone number
	`|(?P<email>[\w.%+-]+@[\w-]+(?:\.[\w-]+)+)` +
	`|(?P<cnpj>\b\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}\b)` +
	`|(?P<cpf>\b\d{3}\.\d{3}\.\d{3}-\d{2}\b)` +
	`|(?P<phone>\+\d[\d ().-]{6,18}\d\b|\(\d{2}\) ?9?\d{4}[- ]?\d{4}\b|\b(?:\d{2} )?9?\d{4}-\d{4}\b)` +
	`|(?P<number>\b\d{10,13}\b)`) // a CPF or a phone number without marks

// Scrub replaces what may be personal data in a text: e-mail addresses, phone
// numbers, CPF and CNPJ, with and without their marks, by its kind in brackets,
// such as [cpf]. It takes too much rather than too little: any lone number of 10
// to 13 digits is gone too. UUIDs stay.
func Scrub(text string) string {
	names := personalRE.SubexpNames()
	return personalRE.ReplaceAllStringFunc(text, func(found string) string {
		for i, group := range personalRE.FindStringSubmatch(found) {
			switch {
			case i == 0 || group == "":
			case names[i] == "uuid":
				return found
			case names[i] == "chat":
				return "[phone]"
			default:
				return "[" + names[i] + "]"
			}
		}
		return "[number]" // matches only where it stood
	})
}
